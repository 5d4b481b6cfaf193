//! `/v1/completions`: text in, text out, with all four shapes of a prompt.

use super::chat_writer::logprob;
use super::error::ApiError;
use super::generation::{Asked, Generation, Planned};
use super::sampling::Sampling;
use super::streaming::{Writer, finished, stream_response};
use super::{App, parse, prepare, unix_now};
use crate::text::{Answer, Finish, sentences};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use wire::openai::Usage;
use wire::sse::data_event;

/// OpenAI's and vLLM's default length of a text completion.
const MAX_TOKENS_DEFAULT: usize = 16;
/// Prompts in one request; each one is a sequence of its own.
const PROMPTS_MAX: usize = 2048;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default)]
    model: Option<String>,
    prompt: Prompts,
    #[serde(default)]
    echo: Option<bool>,
    #[serde(default)]
    logprobs: Option<u32>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(flatten)]
    sampling: Sampling,
}

/// `"text"`, `["text", …]`, `[1, 2, …]` or `[[1, 2, …], …]`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "a prompt is a string, a list of strings, a list of tokens or a list of lists of tokens"
)]
pub enum Prompts {
    /// One text.
    Text(String),
    /// One prompt as tokens. Before the texts, so that an empty list is one.
    Tokens(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several prompts as tokens.
    TokenLists(Vec<Vec<u32>>),
}

impl Prompts {
    /// The tokens of each prompt.
    pub fn into_tokens(
        self,
        app: &App,
        add_special_tokens: bool,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |text: &String| app.tokenizer.encode(text, add_special_tokens);
        let prompts = match self {
            Self::Text(text) => vec![encode(&text)],
            Self::Texts(texts) => texts.iter().map(encode).collect(),
            Self::Tokens(tokens) => vec![tokens],
            Self::TokenLists(lists) => lists,
        };
        if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::bad_request("The decoder prompt cannot be empty"));
        }
        if prompts.len() > PROMPTS_MAX {
            return Err(ApiError::bad_request(format!(
                "at most {PROMPTS_MAX} prompts fit into one request, got {}",
                prompts.len()
            )));
        }
        Ok(prompts)
    }
}

struct Prepared {
    model: String,
    prompts: Vec<Planned>,
    sampling: Sampling,
    echo: bool,
    logprobs: bool,
}

/// The handler.
pub async fn serve(
    app: web::Data<App>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    app.admit().await?;
    let prepared = prepare(&app, payload, plan).await?;
    let echoes = match prepared.echo {
        true => prepared
            .prompts
            .iter()
            .flat_map(|planned| vec![app.tokenizer.decode(&planned.prompt); planned.answers.len()])
            .collect(),
        false => Vec::new(),
    };
    let (stream, include_usage) = (
        prepared.sampling.streams(),
        prepared.sampling.includes_usage(),
    );
    let asked = Asked {
        prompts: prepared.prompts,
        salt: prepared.sampling.cache_salt.unwrap_or_default(),
        kv: Some(prepared.sampling.kv),
    };
    let mut generation = Generation::start(&app, &request, asked);
    let writer = TextWriter {
        id: app.answer_id("cmpl", &request),
        created: unix_now(),
        model: prepared.model,
        echoes,
        logprobs: prepared.logprobs,
        include_usage,
    };
    if stream {
        return Ok(stream_response(generation, writer));
    }
    match finished(&mut generation).await {
        Ok(()) => Ok(HttpResponse::Ok().json(writer.whole(&generation))),
        Err(instead) => Ok(instead),
    }
}

fn plan(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let request: CompletionRequest = parse(body)?;
    let model = app.check_model(request.model.as_deref())?;
    let sampling = request.sampling;
    let choices = sampling.choices()?;
    let mut prompts = Vec::new();
    for prompt in request
        .prompt
        .into_tokens(app, request.add_special_tokens.unwrap_or(true))?
    {
        let bounds = sampling.bounds(&app.config, prompt.len(), Some(MAX_TOKENS_DEFAULT))?;
        let answers = (0..choices)
            .map(|choice| {
                sentences(
                    app.tokenizer,
                    &prompt,
                    sampling.seed(&app.config, choice),
                    &bounds,
                )
            })
            .collect();
        prompts.push(Planned {
            prompt: prompt.into(),
            answers,
        });
    }
    Ok(Prepared {
        model,
        prompts,
        echo: request.echo.unwrap_or(false),
        logprobs: request.logprobs.is_some(),
        sampling,
    })
}

/// Writes a text completion's answer.
struct TextWriter {
    id: String,
    created: u64,
    model: String,
    /// The prompts' texts by choice, if they are to be repeated.
    echoes: Vec<String>,
    logprobs: bool,
    include_usage: bool,
}

impl TextWriter {
    fn object(&self, choices: Value, usage: Option<Usage>) -> Value {
        let mut object = json!({"id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices});
        if let Some(usage) = usage {
            object["usage"] = json!(usage);
        }
        object
    }

    fn token_logprobs(&self, answer: &Answer, range: std::ops::Range<usize>) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let offset = |at: usize| answer.pieces[..at].iter().map(String::len).sum::<usize>();
        json!({
            "tokens": &answer.pieces[range.clone()],
            "token_logprobs": answer.tokens[range.clone()].iter().map(|token| logprob(*token)).collect::<Vec<_>>(),
            "text_offset": range.clone().map(offset).collect::<Vec<_>>(),
            "top_logprobs": range.map(|at| json!({&answer.pieces[at]: logprob(answer.tokens[at])})).collect::<Vec<_>>(),
        })
    }

    fn whole(&self, generation: &Generation) -> Value {
        let choices: Vec<Value> = (0..generation.choices())
            .map(|index| {
                let answer = generation.answer(index);
                let text = self.echoes.get(index).cloned().unwrap_or_default() + &answer.pieces.concat();
                json!({
                    "index": index, "text": text, "logprobs": self.token_logprobs(answer, 0..answer.tokens.len()),
                    "finish_reason": answer.finish.name(), "stop_reason": null, "prompt_logprobs": null,
                })
            })
            .collect();
        let mut object = self.object(choices.into(), Some(generation.usage()));
        object["kv_transfer_params"] = json!(generation.kv_transfer_params());
        object
    }
}

impl Writer for TextWriter {
    fn token(
        &mut self,
        generation: &Generation,
        choice: usize,
        at: usize,
        finish: Option<Finish>,
        out: &mut VecDeque<Bytes>,
    ) {
        let answer = generation.answer(choice);
        let mut text = answer.pieces[at].clone();
        if let Some(echo) = self.echoes.get(choice).filter(|_| at == 0) {
            text.insert_str(0, echo);
        }
        if text.is_empty() && finish.is_none() {
            return;
        }
        let choice = json!({
            "index": choice, "text": text, "logprobs": self.token_logprobs(answer, at..at + 1),
            "finish_reason": finish.map(Finish::name), "stop_reason": null,
        });
        out.push_back(data_event(
            self.object(json!([choice]), None).to_string().as_bytes(),
        ));
    }

    fn usage(&self, usage: Usage) -> Bytes {
        data_event(self.object(json!([]), Some(usage)).to_string().as_bytes())
    }

    fn includes_usage(&self) -> bool {
        self.include_usage
    }
}
