//! `/tokenize` and `/detokenize`.

use super::error::ApiError;
use super::messages::{Message, plain_messages};
use super::{App, parse, prepare};
use crate::tokenizer::ChatPrompt;
use actix_web::{HttpResponse, web};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    return_token_strs: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    #[serde(default)]
    model: Option<String>,
    tokens: Vec<u32>,
}

/// Text, or a chat, to tokens.
pub async fn tokenize(
    app: web::Data<App>,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(prepare(&app, payload, to_tokens).await?))
}

/// Tokens to text.
pub async fn detokenize(
    app: web::Data<App>,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(prepare(&app, payload, to_text).await?))
}

fn to_tokens(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let request: TokenizeRequest = parse(body)?;
    app.check_model(request.model.as_deref())?;
    let tokens = match (request.prompt, request.messages) {
        (Some(prompt), None) => app
            .tokenizer
            .encode(&prompt, request.add_special_tokens.unwrap_or(true)),
        (None, Some(messages)) => {
            let continue_final_message = request.continue_final_message.unwrap_or(false);
            let chat = ChatPrompt {
                messages: plain_messages(messages),
                tools: request.tools.unwrap_or_default(),
                add_generation_prompt: request
                    .add_generation_prompt
                    .unwrap_or(!continue_final_message),
                continue_final_message,
            };
            let text = app.tokenizer.render(&chat).map_err(|fault| {
                ApiError::bad_request(format!("the chat template refused: {fault}"))
            })?;
            // The template writes the begin-of-text mark itself.
            app.tokenizer
                .encode(&text, request.add_special_tokens.unwrap_or(false))
        }
        _ => return Err(ApiError::bad_request("give either prompt or messages")),
    };
    let strings = request.return_token_strs.unwrap_or(false).then(|| {
        tokens
            .iter()
            .map(|token| app.tokenizer.spelling(*token))
            .collect::<Vec<_>>()
    });
    Ok(
        json!({"count": tokens.len(), "max_model_len": app.config.max_model_len, "tokens": tokens, "token_strs": strings}),
    )
}

fn to_text(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let request: DetokenizeRequest = parse(body)?;
    app.check_model(request.model.as_deref())?;
    if let Some(unknown) = request
        .tokens
        .iter()
        .find(|token| **token >= app.tokenizer.vocabulary())
    {
        return Err(ApiError::bad_field(
            "tokens",
            format!("token {unknown} is out of vocabulary"),
        ));
    }
    Ok(json!({"prompt": app.tokenizer.decode(&request.tokens)}))
}
