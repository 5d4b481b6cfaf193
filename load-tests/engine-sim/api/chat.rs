//! `/v1/chat/completions`: from the request to a planned answer or tool call. `chat_writer` writes it.

use super::chat_writer::ChatWriter;
use super::error::ApiError;
use super::generation::{Asked, Generation, Planned};
use super::messages::{Message, plain_messages};
use super::sampling::Sampling;
use super::streaming::{finished, stream_response};
use super::{App, parse, prepare, unix_now};
use crate::kv_transfer::leg::KvWish;
use crate::text::sentences;
use crate::tokenizer::ChatPrompt;
use crate::tool_call::tool_call;
use actix_web::{HttpRequest, HttpResponse, web};
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default)]
    model: Option<String>,
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(flatten)]
    sampling: Sampling,
}

/// A chat ready for the engine.
struct Prepared {
    model: String,
    planned: Planned,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
    salt: String,
    kv: KvWish,
}

/// The handler.
pub async fn serve(
    app: web::Data<App>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    app.admit().await?;
    let prepared = prepare(&app, payload, plan).await?;
    let asked = Asked {
        prompts: vec![prepared.planned],
        salt: prepared.salt,
        kv: Some(prepared.kv),
    };
    let mut generation = Generation::start(&app, &request, asked);
    let writer = ChatWriter {
        id: app.answer_id("chatcmpl", &request),
        created: unix_now(),
        model: prepared.model,
        logprobs: prepared.logprobs,
        include_usage: prepared.include_usage,
        opened: vec![false; generation.choices()],
    };
    if prepared.stream {
        return Ok(stream_response(generation, writer));
    }
    match finished(&mut generation).await {
        Ok(()) => Ok(HttpResponse::Ok().json(writer.whole(&generation))),
        Err(instead) => Ok(instead),
    }
}

fn plan(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let request: ChatRequest = parse(body)?;
    let model = app.check_model(request.model.as_deref())?;
    if request.messages.is_empty() {
        return Err(ApiError::bad_field(
            "messages",
            "messages must not be empty.",
        ));
    }
    let continue_final_message = request.continue_final_message.unwrap_or(false);
    let chat = ChatPrompt {
        messages: plain_messages(request.messages),
        tools: request.tools.unwrap_or_default(),
        add_generation_prompt: request
            .add_generation_prompt
            .unwrap_or(!continue_final_message),
        continue_final_message,
    };
    let called = called_function(app, &chat, request.tool_choice.as_ref())?;
    let text = app
        .tokenizer
        .render(&chat)
        .map_err(|fault| ApiError::bad_request(format!("the chat template refused: {fault}")))?;
    let prompt = app.tokenizer.encode(&text, false);
    let sampling = request.sampling;
    let bounds = sampling.bounds(&app.config, prompt.len(), None)?;
    let answers = (0..sampling.choices()?).map(|choice| {
        let seed = sampling.seed(&app.config, choice);
        match &called {
            Some((function, schema)) => tool_call(
                app.tokenizer,
                function,
                schema,
                crate::text::digest(&prompt, seed),
                bounds.max_tokens,
            ),
            None => sentences(app.tokenizer, &prompt, seed, &bounds),
        }
    });
    let answers = answers.collect();
    Ok(Prepared {
        model,
        planned: Planned {
            prompt: prompt.into(),
            answers,
        },
        stream: sampling.streams(),
        include_usage: sampling.includes_usage(),
        logprobs: request.logprobs.unwrap_or(false),
        salt: sampling.cache_salt.unwrap_or_default(),
        kv: sampling.kv,
    })
}

/// The function that the answer calls and the schema of its parameters. A free model calls one when the last user message, not
/// yet followed by a result, names it.
fn called_function(
    app: &App,
    chat: &ChatPrompt,
    choice: Option<&Value>,
) -> Result<Option<(String, Value)>, ApiError> {
    let functions: Vec<(String, Value)> = chat
        .tools
        .iter()
        .filter_map(|tool| {
            Some((
                tool["function"]["name"].as_str()?.to_owned(),
                tool["function"]["parameters"].clone(),
            ))
        })
        .collect();
    let named_by_user = || {
        let last = chat
            .messages
            .last()
            .filter(|message| message.role == "user")?;
        functions
            .iter()
            .find(|(name, _)| last.content.contains(name.as_str()))
            .cloned()
    };
    if functions.is_empty() && choice.is_some_and(|choice| choice != "none" && !choice.is_null()) {
        return Err(ApiError::bad_field(
            "tool_choice",
            "When using `tool_choice`, `tools` must be set.",
        ));
    }
    match choice {
        None | Some(Value::Null) if app.config.auto_tool_choice => Ok(named_by_user()),
        None | Some(Value::Null) if functions.is_empty() => Ok(None),
        Some(Value::String(mode)) if mode == "auto" && app.config.auto_tool_choice => {
            Ok(named_by_user())
        }
        None | Some(Value::Null) => Err(auto_is_off()),
        Some(Value::String(mode)) => match mode.as_str() {
            "none" => Ok(None),
            "required" => Ok(named_by_user().or_else(|| functions.first().cloned())),
            "auto" => Err(auto_is_off()),
            other => Err(ApiError::bad_field(
                "tool_choice",
                format!("Invalid value for `tool_choice`: {other}."),
            )),
        },
        Some(named) => {
            let wanted = named["function"]["name"].as_str().unwrap_or_default();
            let found = functions.into_iter().find(|(name, _)| name == wanted);
            let missing = || {
                ApiError::bad_field(
                    "tool_choice",
                    "The tool specified in `tool_choice` does not match any of the specified `tools`.",
                )
            };
            found.ok_or_else(missing).map(Some)
        }
    }
}

fn auto_is_off() -> ApiError {
    ApiError::bad_request(
        "\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set",
    )
}
