//! One request's tokens as they come from the engine, joined with the text that was planned for them, counted, and broken off
//! where a fault says so. Chat and text completions differ only in how they write what this gives.

use super::App;
use super::connection::Connection;
use super::error::ApiError;
use crate::engine_client::{EngineClient, Tokens, Work};
use crate::failure::Break;
use crate::kv_transfer::Transfer;
use crate::kv_transfer::leg::{KvWish, Leg};
use crate::text::{Answer, Finish};
use actix_web::HttpRequest;
use serde_json::Value;
use std::sync::Arc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use wire::openai::{PromptTokensDetails, Usage};

/// A prompt with its answers, one per choice.
pub struct Planned {
    /// The prompt's tokens.
    pub prompt: Arc<[u32]>,
    /// At least one.
    pub answers: Vec<Answer>,
}

/// What a request asks of the engine.
pub struct Asked {
    /// At least one.
    pub prompts: Vec<Planned>,
    /// Keeps equal prompts apart in the cache.
    pub salt: String,
    /// What it says about keys and values of other engines; none where they are not shared.
    pub kv: Option<KvWish>,
}

/// What comes next.
pub enum Event {
    /// Another token of one choice.
    Token {
        /// Which choice.
        choice: usize,
        /// Its place in the answer, from 0.
        at: usize,
        /// Set on the last one.
        finish: Option<Finish>,
    },
    /// All choices are complete.
    End,
    /// A fault, or the engine's end, cut the answer.
    Broken(Break),
    /// There will be no answer.
    Failed(ApiError),
}

/// A request that may still wait for keys and values of its prompt.
enum Phase {
    Loading(Submission),
    Running(Tokens),
}

struct Submission {
    engine: EngineClient,
    works: Vec<Work>,
    salt: String,
    arrived: Instant,
}

impl Submission {
    fn submit(&mut self) -> Tokens {
        let (works, salt) = (
            std::mem::take(&mut self.works),
            std::mem::take(&mut self.salt),
        );
        self.engine.submit(works, salt, self.arrived)
    }
}

/// A running request. Dropping it aborts the request.
pub struct Generation {
    phase: Phase,
    transfer: Option<Arc<Transfer>>,
    /// Hands keys and values over, from the first token on.
    saving: Option<JoinHandle<Option<Value>>>,
    /// What the client is to pass on to another engine.
    kv_transfer_params: Option<Value>,
    answers: Vec<Answer>,
    /// Tokens so far, by choice.
    progress: Vec<usize>,
    /// Prompt tokens found in the cache, by choice.
    cached: Vec<usize>,
    choices_per_prompt: usize,
    open: usize,
    prompt_tokens: usize,
    emitted: u32,
    break_off: Option<(u32, Break)>,
    connection: Option<Connection>,
    tells_cached: bool,
}

impl Generation {
    /// Hands the prompts to the engine, at once or, where keys and values are to come from elsewhere, when they are there. Only a
    /// lone prompt is shared with other engines.
    pub fn start(app: &App, request: &HttpRequest, asked: Asked) -> Self {
        let Asked { prompts, salt, kv } = asked;
        let transfer = match (&app.kv, kv, prompts.as_slice()) {
            (Some(kv), Some(wish), [planned]) => kv.transfer(Leg {
                prompt: planned.prompt.clone(),
                salt: salt.clone(),
                request_id: super::request_id(request).unwrap_or_default().to_owned(),
                wish,
            }),
            _ => None,
        };
        let mut pin = transfer.as_ref().is_some_and(|transfer| transfer.pins());
        let choices_per_prompt = prompts.first().map_or(1, |planned| planned.answers.len());
        let prompt_tokens = prompts.iter().map(|planned| planned.prompt.len()).sum();
        let mut works = Vec::new();
        let mut answers = Vec::new();
        for planned in prompts {
            for answer in planned.answers {
                let ends_by_length = answer.finish == Finish::Length;
                works.push(Work {
                    prompt: planned.prompt.clone(),
                    answer: answer.tokens.clone(),
                    ends_by_length,
                    loaded: 0..0,
                    pin: std::mem::take(&mut pin), // the choices share the blocks
                });
                answers.push(answer);
            }
        }
        let mut submission = Submission {
            engine: app.engine.clone(),
            works,
            salt,
            arrived: Instant::now(),
        };
        Self {
            phase: match transfer {
                Some(_) => Phase::Loading(submission),
                None => Phase::Running(submission.submit()),
            },
            transfer,
            saving: None,
            kv_transfer_params: None,
            open: answers.len(),
            progress: vec![0; answers.len()],
            cached: vec![0; answers.len()],
            answers,
            choices_per_prompt,
            prompt_tokens,
            emitted: 0,
            break_off: app.faults.break_off(),
            connection: request.conn_data::<Connection>().cloned(),
            tells_cached: app.config.prompt_tokens_details,
        }
    }

    /// The next token, or how it ended.
    pub async fn next(&mut self) -> Event {
        if self.open == 0 {
            if let Some(saving) = self.saving.take() {
                self.kv_transfer_params = saving.await.unwrap_or(None);
            }
            return Event::End;
        }
        if let Err(why) = self.load().await {
            return Event::Failed(ApiError::kv_transfer(why));
        }
        let Phase::Running(tokens) = &mut self.phase else {
            return Event::Broken(Break::Error);
        };
        let Some(mut token) = tokens.next().await else {
            return Event::Broken(Break::Error);
        };
        let pin = token.pin.take();
        if let Some(transfer) = self.transfer.take() {
            self.saving = Some(actix_web::rt::spawn(transfer.save(pin)));
        }
        if let Some((_, how)) = self.break_off.filter(|(at, _)| self.emitted >= *at) {
            return Event::Broken(how);
        }
        self.emitted += 1;
        let choice = token.choice;
        let at = self.progress[choice];
        self.progress[choice] += 1;
        self.cached[choice] = token.cached;
        self.open -= usize::from(token.last);
        Event::Token {
            choice,
            at,
            finish: token.last.then(|| self.answers[choice].finish),
        }
    }

    /// Waits for keys and values of the prompt, once, then hands it to the engine.
    async fn load(&mut self) -> Result<(), String> {
        let Phase::Loading(submission) = &mut self.phase else {
            return Ok(());
        };
        if let Some(transfer) = &self.transfer {
            let loaded = transfer.load().await?;
            for work in &mut submission.works {
                work.loaded = loaded.clone();
            }
        }
        self.phase = Phase::Running(submission.submit());
        Ok(())
    }

    /// What the client is to pass on to another engine; known at the end.
    pub fn kv_transfer_params(&self) -> Option<&Value> {
        self.kv_transfer_params.as_ref()
    }

    /// Makes the end of the connection a reset, after what was written so far has left.
    pub async fn reset_connection(&self) {
        tokio::task::yield_now().await; // the server flushes while the body is not ready
        if let Some(connection) = &self.connection {
            connection.reset_at_close();
        }
    }

    /// What was planned for a choice.
    pub fn answer(&self, choice: usize) -> &Answer {
        &self.answers[choice]
    }

    /// How many choices there are.
    pub fn choices(&self) -> usize {
        self.answers.len()
    }

    /// The counts so far.
    pub fn usage(&self) -> Usage {
        let completion: usize = self.progress.iter().sum();
        // The choices of one prompt share it: the first one tells what the cache had before this request.
        let cached: usize = self.cached.iter().step_by(self.choices_per_prompt).sum();
        usage(
            self.prompt_tokens,
            Some(completion),
            self.tells_cached.then_some(cached),
        )
    }
}

/// A `usage` object.
pub fn usage(prompt: usize, completion: Option<usize>, cached: Option<usize>) -> Usage {
    Usage {
        prompt_tokens: prompt as u64,
        completion_tokens: completion.map(|count| count as u64),
        total_tokens: (prompt + completion.unwrap_or(0)) as u64,
        prompt_tokens_details: cached.map(|count| PromptTokensDetails {
            cached_tokens: Some(count as u64),
        }),
    }
}
