//! The paths that are forwarded to engines, and what is known of each.

use wire::request::PromptField;

/// A path family of the API; also a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApiRoute {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/rerank`
    Rerank,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
}

impl ApiRoute {
    /// All of them.
    pub const ALL: [ApiRoute; 8] = [
        ApiRoute::Chat,
        ApiRoute::Completions,
        ApiRoute::Embeddings,
        ApiRoute::Responses,
        ApiRoute::Messages,
        ApiRoute::Rerank,
        ApiRoute::Tokenize,
        ApiRoute::Detokenize,
    ];

    /// The path, here and at the engine.
    pub fn path(self) -> &'static str {
        match self {
            ApiRoute::Chat => "/v1/chat/completions",
            ApiRoute::Completions => "/v1/completions",
            ApiRoute::Embeddings => "/v1/embeddings",
            ApiRoute::Responses => "/v1/responses",
            ApiRoute::Messages => "/v1/messages",
            ApiRoute::Rerank => "/v1/rerank",
            ApiRoute::Tokenize => "/tokenize",
            ApiRoute::Detokenize => "/detokenize",
        }
    }

    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            ApiRoute::Chat => "chat",
            ApiRoute::Completions => "completions",
            ApiRoute::Embeddings => "embeddings",
            ApiRoute::Responses => "responses",
            ApiRoute::Messages => "messages",
            ApiRoute::Rerank => "rerank",
            ApiRoute::Tokenize => "tokenize",
            ApiRoute::Detokenize => "detokenize",
        }
    }

    /// Where its prompt stands, for the prefix ring.
    pub fn prompt_field(self) -> PromptField {
        match self {
            ApiRoute::Chat | ApiRoute::Messages => PromptField::Messages,
            ApiRoute::Completions => PromptField::Prompt,
            ApiRoute::Responses => PromptField::Input,
            // no KV cache to share, or no generation
            ApiRoute::Embeddings | ApiRoute::Rerank | ApiRoute::Tokenize | ApiRoute::Detokenize => {
                PromptField::None
            }
        }
    }

    /// Whether the events of its streams have names.
    pub fn has_named_events(self) -> bool {
        matches!(self, ApiRoute::Responses | ApiRoute::Messages)
    }

    /// Whether it answers with one of OpenAI's objects.
    pub fn answers_openai(self) -> bool {
        matches!(
            self,
            ApiRoute::Chat | ApiRoute::Completions | ApiRoute::Embeddings
        )
    }

    /// Whether engines generate for it, or compute over whole prompts; the others only look words up.
    pub fn generates(self) -> bool {
        !matches!(self, ApiRoute::Tokenize | ApiRoute::Detokenize)
    }

    /// Whether its answers have tokens that engines make.
    pub fn has_answer_tokens(self) -> bool {
        self.generates() && !matches!(self, ApiRoute::Embeddings | ApiRoute::Rerank)
    }

    /// Whether its streams end with `data: [DONE]`, and usage can be asked for.
    pub fn is_openai_stream(self) -> bool {
        matches!(self, ApiRoute::Chat | ApiRoute::Completions)
    }
}
