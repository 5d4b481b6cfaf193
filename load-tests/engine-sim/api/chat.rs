//! `/v1/chat/completions`: template, tokens, answer or tool call, as one JSON object or as a stream of deltas.

use super::error::ApiError;
use super::generation::{Generation, Planned, Writer, finished, stream_response};
use super::sampling::Sampling;
use super::{App, parse, prepare, unix_now};
use crate::text::{Answer, Finish, sentences, tool_call};
use crate::tokenizer::{ChatPrompt, PlainCall, PlainMessage};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use wire::openai::Usage;
use wire::sse::data_event;

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

/// One message of a chat, as clients send it.
#[derive(Debug, Deserialize)]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<MessageCall>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MessageCall {
    function: MessageFunction,
}

#[derive(Debug, Deserialize)]
struct MessageFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// A chat ready for the engine.
struct Prepared {
    model: String,
    planned: Planned,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
    salt: String,
}

/// The handler.
pub async fn serve(app: web::Data<App>, request: HttpRequest, payload: web::Payload) -> Result<HttpResponse, ApiError> {
    app.admit().await?;
    let prepared = prepare(&app, payload, plan).await?;
    let mut generation = Generation::start(&app, vec![prepared.planned], prepared.salt);
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

/// Flattens messages for the template. Media parts stand as a mark of their kind.
pub fn plain_messages(messages: Vec<Message>) -> Vec<PlainMessage> {
    let content = |content| match content {
        None => String::new(),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => parts.into_iter().map(|part| part.text.unwrap_or_else(|| format!("[{}]", part.kind))).collect(),
    };
    let call = |call: MessageCall| PlainCall {
        name: call.function.name,
        arguments: match call.function.arguments {
            Value::String(text) => text,
            Value::Null => "{}".to_owned(),
            other => other.to_string(),
        },
    };
    let plain = |message: Message| PlainMessage {
        role: message.role,
        content: content(message.content),
        tool_calls: message.tool_calls.unwrap_or_default().into_iter().map(call).collect(),
    };
    messages.into_iter().map(plain).collect()
}

fn plan(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let request: ChatRequest = parse(body)?;
    let model = app.check_model(request.model.as_deref())?;
    if request.messages.is_empty() {
        return Err(ApiError::bad_field("messages", "messages must not be empty."));
    }
    let continue_final_message = request.continue_final_message.unwrap_or(false);
    let chat = ChatPrompt {
        messages: plain_messages(request.messages),
        tools: request.tools.unwrap_or_default(),
        add_generation_prompt: request.add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
    };
    let called = called_function(app, &chat, request.tool_choice.as_ref())?;
    let text = app.tokenizer.render(&chat).map_err(|fault| ApiError::bad_request(format!("the chat template refused: {fault}")))?;
    let prompt = app.tokenizer.encode(&text, false);
    let sampling = request.sampling;
    let bounds = sampling.bounds(&app.config, prompt.len(), None)?;
    let answers = (0..sampling.choices()?).map(|choice| {
        let seed = sampling.seed(&app.config, choice);
        match &called {
            Some((function, schema)) => {
                tool_call(app.tokenizer, function, schema, crate::text::digest(&prompt, seed), bounds.max_tokens)
            }
            None => sentences(app.tokenizer, &prompt, seed, &bounds),
        }
    });
    let answers = answers.collect();
    Ok(Prepared {
        model,
        planned: Planned { prompt: prompt.into(), answers },
        stream: sampling.streams(),
        include_usage: sampling.includes_usage(),
        logprobs: request.logprobs.unwrap_or(false),
        salt: sampling.cache_salt.unwrap_or_default(),
    })
}

/// The function that the answer calls and the schema of its parameters. A free model calls one when the last user message, not
/// yet followed by a result, names it.
fn called_function(app: &App, chat: &ChatPrompt, choice: Option<&Value>) -> Result<Option<(String, Value)>, ApiError> {
    let functions: Vec<(String, Value)> = chat
        .tools
        .iter()
        .filter_map(|tool| Some((tool["function"]["name"].as_str()?.to_owned(), tool["function"]["parameters"].clone())))
        .collect();
    let named_by_user = || {
        let last = chat.messages.last().filter(|message| message.role == "user")?;
        functions.iter().find(|(name, _)| last.content.contains(name.as_str())).cloned()
    };
    if functions.is_empty() && choice.is_some_and(|choice| choice != "none" && !choice.is_null()) {
        return Err(ApiError::bad_field("tool_choice", "When using `tool_choice`, `tools` must be set."));
    }
    match choice {
        None | Some(Value::Null) if app.config.auto_tool_choice => Ok(named_by_user()),
        None | Some(Value::Null) if functions.is_empty() => Ok(None),
        Some(Value::String(mode)) if mode == "auto" && app.config.auto_tool_choice => Ok(named_by_user()),
        None | Some(Value::Null) => Err(auto_is_off()),
        Some(Value::String(mode)) => match mode.as_str() {
            "none" => Ok(None),
            "required" => Ok(named_by_user().or_else(|| functions.first().cloned())),
            "auto" => Err(auto_is_off()),
            other => Err(ApiError::bad_field("tool_choice", format!("Invalid value for `tool_choice`: {other}."))),
        },
        Some(named) => {
            let wanted = named["function"]["name"].as_str().unwrap_or_default();
            let found = functions.into_iter().find(|(name, _)| name == wanted);
            let missing = || ApiError::bad_field("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`.");
            found.ok_or_else(missing).map(Some)
        }
    }
}

fn auto_is_off() -> ApiError {
    ApiError::bad_request("\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set")
}

/// Writes a chat's answer.
struct ChatWriter {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    /// Choices whose role went out.
    opened: Vec<bool>,
}

impl ChatWriter {
    fn chunk(&self, choice: usize, delta: Value, logprobs: Value, finish: Option<Finish>) -> Bytes {
        let mut choice = json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish.map(Finish::name)});
        if finish.is_some() {
            choice["stop_reason"] = Value::Null;
        }
        self.event(json!([choice]), None)
    }

    fn event(&self, choices: Value, usage: Option<Usage>) -> Bytes {
        let mut chunk = json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model, "choices": choices,
        });
        if let Some(usage) = usage {
            chunk["usage"] = json!(usage);
        }
        data_event(chunk.to_string().as_bytes())
    }

    fn call_id(&self, choice: usize) -> String {
        let digest = self.id.bytes().fold(choice as u64, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        format!("chatcmpl-tool-{digest:016x}")
    }

    fn token_logprobs(&self, answer: &Answer, range: std::ops::Range<usize>) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let content: Vec<Value> = range
            .map(|at| {
                let token = &answer.pieces[at];
                json!({"token": token, "logprob": logprob(answer.tokens[at]), "bytes": token.as_bytes(), "top_logprobs": []})
            })
            .collect();
        json!({"content": content})
    }

    /// The answer in one piece.
    fn whole(&self, generation: &Generation) -> Value {
        let choices: Vec<Value> = (0..generation.choices())
            .map(|index| {
                let answer = generation.answer(index);
                let text = answer.pieces.concat();
                let mut message = json!({"role": "assistant", "content": text, "refusal": null, "tool_calls": []});
                if let Some(call) = &answer.call {
                    message["content"] = Value::Null;
                    message["tool_calls"] = json!([{
                        "id": self.call_id(index), "type": "function", "function": {"name": call.function, "arguments": text},
                    }]);
                }
                json!({
                    "index": index,
                    "message": message,
                    "logprobs": self.token_logprobs(answer, 0..answer.tokens.len()),
                    "finish_reason": answer.finish.name(),
                    "stop_reason": null,
                })
            })
            .collect();
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": generation.usage(), "prompt_logprobs": null, "kv_transfer_params": null,
        })
    }
}

impl Writer for ChatWriter {
    fn token(&mut self, generation: &Generation, choice: usize, at: usize, finish: Option<Finish>, out: &mut VecDeque<Bytes>) {
        if !self.opened[choice] {
            self.opened[choice] = true;
            out.push_back(self.chunk(choice, json!({"role": "assistant", "content": ""}), Value::Null, None));
        }
        let answer = generation.answer(choice);
        let piece = &answer.pieces[at];
        let delta = match &answer.call {
            None if piece.is_empty() && finish.is_none() => return,
            None => json!({"content": piece}),
            Some(call) if at + 1 == call.name_tokens => json!({"tool_calls": [{
                "index": 0, "id": self.call_id(choice), "type": "function", "function": {"name": call.function, "arguments": ""},
            }]}),
            Some(_) if piece.is_empty() && finish.is_none() => return,
            Some(_) if piece.is_empty() => json!({}),
            Some(_) => json!({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}),
        };
        out.push_back(self.chunk(choice, delta, self.token_logprobs(answer, at..at + 1), finish));
    }

    fn usage(&self, usage: Usage) -> Bytes {
        self.event(json!([]), Some(usage))
    }

    fn includes_usage(&self) -> bool {
        self.include_usage
    }
}

/// A made-up log probability: the same for the same token.
pub fn logprob(token: u32) -> f64 {
    -f64::from(token.wrapping_mul(0x9e37_79b1) >> 22) / 1024.0
}
