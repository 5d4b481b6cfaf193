//! A model's chat template, rendered as engines do: Jinja as Hugging Face's transformers set it up
//! (trimmed blocks, `tojson` as Python writes JSON, `raise_exception`, `strftime_now`, Python's
//! methods of texts, lists and dicts).

use super::pyjson;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "chat";

/// See the module.
pub(super) struct Template {
    environment: Environment<'static>,
    tokens: BTreeMap<String, String>,
    /// Whether it takes a message's content apart itself; else it gets the texts joined.
    reads_parts: bool,
}

/// What a chat consists of.
#[derive(Debug, Clone, Default)]
pub(super) struct Chat {
    /// The messages, as the client gave them.
    pub messages: Vec<Json>,
    /// The tools, if any.
    pub tools: Option<Json>,
    /// Whether the prompt ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Further values for the template.
    pub kwargs: serde_json::Map<String, Json>,
}

impl Template {
    /// From the template's source and the special tokens that it names, such as `bos_token`.
    ///
    /// # Errors
    /// When it is no template.
    pub(super) fn new(source: String, tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let reads_parts = reads_parts(&source);
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment.add_template_owned(NAME, source)?;
        Ok(Template {
            environment,
            tokens,
            reads_parts,
        })
    }

    /// The text that the model reads; none when the chat has parts other than text.
    ///
    /// # Errors
    /// What the template says.
    pub(super) fn render(&self, chat: &Chat) -> Result<Option<String>, Error> {
        let messages = chat.messages.iter().map(|message| self.message(message));
        let Some(messages) = messages.collect::<Option<Vec<Json>>>() else {
            return Ok(None);
        };
        let given = context! {
            messages => messages,
            tools => chat.tools,
            add_generation_prompt => chat.add_generation_prompt,
            ..Value::from_serialize(&chat.kwargs)
        };
        let all = context! { ..given, ..Value::from_serialize(&self.tokens) };
        let template = self.environment.get_template(NAME)?;
        template.render(all).map(Some)
    }

    /// A message as engines hand it to templates: texts joined by lines unless the template reads
    /// parts, arguments of tool calls as objects.
    fn message(&self, message: &Json) -> Option<Json> {
        let mut message = message.as_object()?.clone();
        if let Some(Json::Array(parts)) = message.get("content") {
            let texts = parts.iter().map(|part| match part {
                Json::String(text) => Some(text.as_str()),
                part => part
                    .get("text")?
                    .as_str()
                    .filter(|_| part["type"] == "text"),
            });
            let texts = texts.collect::<Option<Vec<&str>>>()?;
            if !self.reads_parts {
                let joined = texts.join("\n");
                message.insert("content".into(), joined.into());
            }
        }
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(object) = arguments
                    .as_str()
                    .and_then(|s| serde_json::from_str(s).ok())
            {
                *arguments = object;
            }
        }
        Some(Json::Object(message))
    }
}

/// Whether a template goes through the parts of a content, as engines find out, too.
fn reads_parts(source: &str) -> bool {
    [
        "in message.content",
        "in message['content']",
        "in message[\"content\"]",
        "in content %}",
        "in content -%}",
    ]
    .iter()
    .any(|loops| source.contains(loops))
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    pyjson::dumps(value, indent)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// The present day in UTC by the directives that templates use; others stay as they are.
fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let days = now.map_or(0, |now| now.as_secs() / 86_400);
    day(format, days as i64)
}

/// A day, counted from the first of 1970.
fn day(format: &str, days: i64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (year, month, day) = date(days);
    let name = MONTHS[month as usize - 1];
    format
        .replace("%d", &format!("{day:02}"))
        .replace("%m", &format!("{month:02}"))
        .replace("%Y", &year.to_string())
        .replace("%B", name)
        .replace("%b", &name[..3])
}

/// Year, month and day. Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
fn date(days: i64) -> (i64, u32, u32) {
    let shifted = days + 719_468; // from the first of March of year 0
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as u32, day as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: Json) -> Result<Option<String>, Error> {
        let tokens = [("bos_token".to_owned(), "<s>".to_owned())].into();
        let template = Template::new(source.into(), tokens).unwrap();
        let chat = Chat {
            messages: messages.as_array().unwrap().clone(),
            tools: Some(json!([{"z": 1, "a": "<b>"}])),
            add_generation_prompt: true,
            kwargs: json!({"thinking": false}).as_object().unwrap().clone(),
        };
        template.render(&chat)
    }

    #[test]
    fn templates_find_what_transformers_gives_them() {
        let source = "\
{{ bos_token }}{% for m in messages %}
{{ m['role'] + ':' + m.content.strip() }};
{%- endfor %}
{% if thinking is defined and not thinking %}quiet{% endif %}
{{ tools[0] | tojson }}{{ messages[0].get('name', 'nobody') }}";
        let messages = json!([{"role": "user", "content": "  hi "}]);
        let text = render(source, messages).unwrap().unwrap();
        assert_eq!(text, "<s>user:hi;quiet{\"z\": 1, \"a\": \"<b>\"}nobody");
    }

    #[test]
    fn parts_are_joined_unless_the_template_reads_them_and_media_have_no_text() {
        let text = |part: &str| json!({"type": "text", "text": part});
        let message = json!([{"role": "user", "content": [text("a"), text("b")]}]);
        let joined = render("{{ messages[0].content }}", message.clone());
        assert_eq!(joined.unwrap().unwrap(), "a\nb");
        let parts = "{% for message in messages %}{% for p in message.content %}[{{ p.text }}]{% endfor %}{% endfor %}";
        assert_eq!(render(parts, message).unwrap().unwrap(), "[a][b]");
        let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]);
        assert_eq!(render("{{ messages }}", image).unwrap(), None);
    }

    #[test]
    fn arguments_of_tool_calls_are_objects_and_exceptions_are_errors() {
        let call = json!([{"role": "assistant", "content": null, "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"x\": 1}"}}]}]);
        let source = "{{ messages[0].tool_calls[0].function.arguments.x + 1 }}";
        assert_eq!(render(source, call).unwrap().unwrap(), "2");
        let refused = render("{{ raise_exception('no system role') }}", json!([]));
        assert!(refused.unwrap_err().to_string().contains("no system role"));
    }

    #[test]
    fn days_have_their_dates() {
        assert_eq!(day("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(day("%Y-%m-%d", 19_782), "2024-02-29");
        assert_eq!(day("%d %B %Y %H", 20_787), "30 November 2026 %H");
    }
}
