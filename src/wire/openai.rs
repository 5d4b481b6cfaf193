//! The parts of OpenAI answers that both the gateway and the simulator write or read.
//! Source: the OpenAI API reference and what vLLM sends.

use crate::splice::Cached;
use serde::{Deserialize, Serialize};

/// The error envelope: `{"error":{"message","type","param","code"}}`.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorBody {
    /// The one member.
    pub error: ErrorDetail,
}

/// What went wrong, for people (`message`) and for programs (`type`, `code`).
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorDetail {
    /// One sentence for a person.
    pub message: String,
    /// The class, for example `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field at fault.
    #[serde(default)]
    pub param: Option<String>,
    /// A string (OpenAI) or the HTTP status as a number (vLLM).
    #[serde(default)]
    pub code: Option<serde_json::Value>,
}

/// Token counts of one answer.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens that were generated; absent for embeddings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// The sum.
    #[serde(default)]
    pub total_tokens: u64,
    /// Absent means unknown, never zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

impl Usage {
    /// Says what counts as cached in place of what the engine has said, if it has said something.
    pub fn put_cached(&mut self, cached: Cached) {
        if let Some(details) = &mut self.prompt_tokens_details {
            details.cached_tokens = match cached {
                Cached::Tokens(tokens) => Some(tokens),
                Cached::Unknown => None,
            };
        }
    }

    /// Prompt tokens from the engine's prefix cache; none when it does not say.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details?.cached_tokens
    }
}

/// How many prompt tokens came from the engine's prefix cache.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct PromptTokensDetails {
    /// Tokens; absent means unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
}

/// The answer of `/v1/models`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: String,
    /// One card per model.
    pub data: Vec<ModelCard>,
}

/// One model of `/v1/models`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// Always `model`.
    #[serde(default)]
    pub object: String,
    /// Unix seconds.
    #[serde(default)]
    pub created: u64,
    /// Who serves it, for example `vllm`.
    #[serde(default)]
    pub owned_by: String,
    /// The longest prompt plus answer in tokens, where the engine says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
}
