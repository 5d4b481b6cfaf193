//! The fields that chat and text completions share, and what they mean for an answer's length.

use super::error::ApiError;
use crate::config::SimConfig;
use crate::kv_transfer::leg::KvWish;
use crate::text::Bounds;
use serde::Deserialize;

/// More choices than this are refused; each one takes a place in the batch.
const CHOICES_MAX: usize = 128;

/// How to answer. Unknown fields are ignored, as vLLM ignores them.
#[derive(Debug, Default, Deserialize)]
pub struct Sampling {
    /// Answer as server-sent events.
    #[serde(default)]
    pub stream: Option<bool>,
    /// What the stream carries besides.
    #[serde(default)]
    pub stream_options: Option<StreamOptions>,
    /// Answers per prompt.
    #[serde(default)]
    pub n: Option<usize>,
    /// Longest answer, the older name.
    #[serde(default)]
    pub max_tokens: Option<i64>,
    /// Longest answer.
    #[serde(default)]
    pub max_completion_tokens: Option<i64>,
    /// Shortest answer.
    #[serde(default)]
    pub min_tokens: Option<usize>,
    /// Strings that end the answer.
    #[serde(default)]
    pub stop: Option<OneOrMany>,
    /// Whether the stop string stays in the text.
    #[serde(default)]
    pub include_stop_str_in_output: Option<bool>,
    /// Go on to the limit.
    #[serde(default)]
    pub ignore_eos: Option<bool>,
    /// Another seed gives another answer.
    #[serde(default)]
    pub seed: Option<i64>,
    /// Accepted; answers are always those of temperature 0.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Keeps equal prompts apart in the prefix cache.
    #[serde(default)]
    pub cache_salt: Option<String>,
    /// What is said about keys and values of other engines.
    #[serde(flatten)]
    pub kv: KvWish,
}

/// `stream_options`.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
pub struct StreamOptions {
    /// A last chunk tells the usage.
    #[serde(default)]
    pub include_usage: Option<bool>,
}

/// A string or a list of strings.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "stop is a string or a list of strings")]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl Sampling {
    /// Whether the answer is a stream.
    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether the stream ends with the usage.
    pub fn includes_usage(&self) -> bool {
        self.stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false)
    }

    /// Answers per prompt.
    pub fn choices(&self) -> Result<usize, ApiError> {
        match self.n.unwrap_or(1) {
            0 => Err(ApiError::bad_field("n", "n must be at least 1, got 0.")),
            n if n > CHOICES_MAX => Err(ApiError::bad_field(
                "n",
                format!("n must be at most {CHOICES_MAX}, got {n}."),
            )),
            n => Ok(n),
        }
    }

    /// Seed of one choice.
    pub fn seed(&self, config: &SimConfig, choice: usize) -> u64 {
        config.seed
            ^ (self.seed.unwrap_or(0) as u64).rotate_left(17)
            ^ (choice as u64).rotate_left(47)
    }

    /// Checks the request's limits against the model's. `default_max` is what holds when the request gives none.
    pub fn bounds(
        &self,
        config: &SimConfig,
        prompt: usize,
        default_max: Option<usize>,
    ) -> Result<Bounds, ApiError> {
        if let Some(temperature) = self.temperature.filter(|temperature| *temperature < 0.0) {
            return Err(ApiError::bad_field(
                "temperature",
                format!("temperature must be non-negative, got {temperature}."),
            ));
        }
        if self.stream_options.is_some() && !self.streams() {
            return Err(ApiError::bad_request(
                "Stream options can only be defined when `stream=True`.",
            ));
        }
        if prompt >= config.max_model_len {
            return Err(ApiError::prompt_too_long(config.max_model_len, prompt));
        }
        let room = config.max_model_len - prompt;
        let max_tokens = match self.max_completion_tokens.or(self.max_tokens) {
            Some(max) if max < 1 => {
                return Err(ApiError::bad_field(
                    "max_tokens",
                    format!("max_tokens must be at least 1, got {max}."),
                ));
            }
            Some(max) if max as usize > room => {
                return Err(ApiError::max_tokens_too_large(
                    config.max_model_len,
                    prompt,
                    max as usize,
                ));
            }
            Some(max) => max as usize,
            None => default_max.unwrap_or(room).min(room),
        };
        let min_tokens = self.min_tokens.unwrap_or(0);
        if min_tokens > max_tokens {
            return Err(ApiError::bad_request(format!(
                "min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
            )));
        }
        Ok(Bounds {
            max_tokens,
            min_tokens,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            stop: match &self.stop {
                None => Vec::new(),
                Some(OneOrMany::One(stop)) => vec![stop.clone()],
                Some(OneOrMany::Many(stops)) => stops.clone(),
            },
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            usual_tokens: config.answer_tokens,
        })
    }
}
