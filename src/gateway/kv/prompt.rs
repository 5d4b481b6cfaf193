//! What of a request's body its KV blocks depend on.

use crate::http::routes::ApiRoute;
use serde::Deserialize;
use serde_json::value::RawValue;
use wire::request::PromptField;

/// A shorter prompt is computed sooner than it is tokenised.
const TEXT_LENGTH_MIN: usize = 1024;

/// What of a body its tokens depend on.
#[derive(Deserialize)]
pub(super) struct PromptView<'a> {
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    add_generation_prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    system: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(default)]
    pub(super) cache_salt: Option<String>,
}

impl<'a> PromptView<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(body).ok()
    }

    /// Token ids that the client gave; of a list of prompts, the only one.
    pub(super) fn given(&self) -> Option<Vec<u32>> {
        let raw = self.prompt?.get();
        if let Ok(ids) = serde_json::from_str::<Vec<u32>>(raw) {
            return Some(ids);
        }
        let mut prompts = serde_json::from_str::<Vec<Vec<u32>>>(raw).ok()?;
        (prompts.len() == 1).then(|| prompts.remove(0))
    }

    /// The prompt as it is written, up to where the next turn of a conversation goes on, and what
    /// stands before it: the beginnings of prompts are compared by these.
    pub(super) fn text(&self, route: ApiRoute) -> Option<(Vec<&[u8]>, &[u8])> {
        let main = match route.prompt_field() {
            PromptField::Messages => self.messages,
            PromptField::Prompt => self.prompt,
            PromptField::Input => self.input,
            PromptField::None => None,
        };
        let main = main?.get().as_bytes();
        let main = match main {
            [inner @ .., b']' | b'"'] => inner,
            other => other,
        };
        let raw = |part: Option<&'a RawValue>| part.map_or(&b""[..], |raw| raw.get().as_bytes());
        let salt = self.cache_salt.as_deref().unwrap_or_default().as_bytes();
        let head = vec![
            raw(self.tools),
            raw(self.system),
            raw(self.instructions),
            salt,
        ];
        Some((head, main))
    }

    /// Whether it is long enough to be worth its tokens.
    pub(super) fn is_long(&self, route: ApiRoute) -> bool {
        self.text(route)
            .is_some_and(|(_, text)| text.len() >= TEXT_LENGTH_MIN)
    }

    /// What to ask an engine's `/tokenize`; none for what has no one prompt.
    pub(super) fn question(&self, model: &str, route: ApiRoute) -> Option<String> {
        let model = serde_json::Value::from(model);
        match route {
            ApiRoute::Chat => {
                let messages = self.messages?;
                if messages.get().contains("_url\"") || messages.get().contains("input_audio") {
                    return None; // the engine would fetch or decode media a second time
                }
                let mut out = format!(r#"{{"model":{model},"messages":{}"#, messages.get());
                let add = self.add_generation_prompt.map_or("true", RawValue::get);
                out += &format!(r#","add_generation_prompt":{add}"#);
                for (key, value) in [
                    ("tools", self.tools),
                    ("chat_template_kwargs", self.chat_template_kwargs),
                ] {
                    if let Some(value) = value {
                        out += &format!(r#","{key}":{}"#, value.get());
                    }
                }
                Some(out + "}")
            }
            ApiRoute::Completions => {
                let prompt = self.prompt.filter(|raw| raw.get().starts_with('"'))?;
                let prompt = prompt.get();
                Some(format!(r#"{{"model":{model},"prompt":{prompt}}}"#))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(body: &str) -> PromptView<'_> {
        PromptView::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn token_ids_are_taken_as_given_and_several_prompts_have_no_one_chain() {
        assert_eq!(view(r#"{"prompt":[1,2,3]}"#).given(), Some(vec![1, 2, 3]));
        assert_eq!(view(r#"{"prompt":[[1,2]]}"#).given(), Some(vec![1, 2]));
        for prompt in ["[[1],[2]]", "\"text\"", "[\"a\"]", "[1,\"a\"]", "[-1]"] {
            assert_eq!(
                view(&format!(r#"{{"prompt":{prompt}}}"#)).given(),
                None,
                "{prompt}"
            );
        }
    }

    #[test]
    fn the_question_holds_what_the_tokens_depend_on_and_short_texts_are_not_worth_one() {
        let long = "x".repeat(TEXT_LENGTH_MIN);
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"{long}"}}],"tools":[1],"chat_template_kwargs":{{"a":1}},"temperature":0}}"#
        );
        let question = view(&body).question("m", ApiRoute::Chat).unwrap();
        let json: serde_json::Value = serde_json::from_str(&question).unwrap();
        assert_eq!(json["add_generation_prompt"], true);
        assert_eq!(
            (&json["tools"][0], &json["chat_template_kwargs"]["a"]),
            (&1.into(), &1.into())
        );
        assert!(json.get("temperature").is_none());
        assert!(view(&body).is_long(ApiRoute::Chat));
        assert!(!view(r#"{"prompt":"short"}"#).is_long(ApiRoute::Completions));
        assert!(
            view(&format!(r#"{{"prompt":["{long}"]}}"#))
                .question("m", ApiRoute::Completions)
                .is_none()
        );
    }

    #[test]
    fn media_are_not_sent_to_be_tokenised() {
        let long = "x".repeat(TEXT_LENGTH_MIN);
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"http://i"}}}},{{"type":"text","text":"{long}"}}]}}]}}"#
        );
        assert!(view(&body).question("m", ApiRoute::Chat).is_none());
    }

    #[test]
    fn the_text_of_a_longer_conversation_begins_with_that_of_a_shorter_one() {
        let body = |turns: &str| {
            format!(
                r#"{{"messages":[{{"role":"user","content":"a"}}{turns}],"system":"s","tools":[1]}}"#
            )
        };
        let (short, long) = (body(""), body(r#",{"role":"assistant","content":"b"}"#));
        let (short, long) = (view(&short), view(&long));
        let (head, text) = short.text(ApiRoute::Messages).unwrap();
        let longer = long.text(ApiRoute::Messages).unwrap();
        assert_eq!(head, longer.0);
        assert!(longer.1.starts_with(text) && longer.1.len() > text.len());
        let prompt = view(r#"{"prompt":"abc","cache_salt":"x"}"#);
        assert_eq!(prompt.text(ApiRoute::Completions).unwrap().1, b"\"abc");
        assert!(prompt.text(ApiRoute::Embeddings).is_none());
    }
}
