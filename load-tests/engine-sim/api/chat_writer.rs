//! How a chat's answer looks on the wire: one JSON object, or a stream of deltas.

use super::generation::Generation;
use super::streaming::Writer;
use crate::text::{Answer, Finish};
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::VecDeque;
use wire::openai::Usage;
use wire::sse::data_event;

/// Writes a chat's answer.
pub struct ChatWriter {
    /// The answer's.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// As the request named it.
    pub model: String,
    /// Whether each token tells its probability.
    pub logprobs: bool,
    /// Whether the stream ends with the usage.
    pub include_usage: bool,
    /// Choices whose role went out.
    pub opened: Vec<bool>,
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
        let digest = self.id.bytes().fold(choice as u64, |state, byte| {
            (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
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
    pub fn whole(&self, generation: &Generation) -> Value {
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
            "choices": choices, "usage": generation.usage(), "prompt_logprobs": null, "kv_transfer_params": generation.kv_transfer_params(),
        })
    }
}

impl Writer for ChatWriter {
    fn token(
        &mut self,
        generation: &Generation,
        choice: usize,
        at: usize,
        finish: Option<Finish>,
        out: &mut VecDeque<Bytes>,
    ) {
        if !self.opened[choice] {
            self.opened[choice] = true;
            out.push_back(self.chunk(
                choice,
                json!({"role": "assistant", "content": ""}),
                Value::Null,
                None,
            ));
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
        out.push_back(self.chunk(
            choice,
            delta,
            self.token_logprobs(answer, at..at + 1),
            finish,
        ));
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
