//! The other kind of answer: a call of one of the request's functions, with arguments that its JSON schema allows.

use crate::text::{Answer, Call, Finish, WORDS, digest};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Schemas can refer to themselves without end only through `$ref`, which is not followed; the depth is bounded all the same.
const SCHEMA_DEPTH_MAX: usize = 8;

/// A call of `function` with arguments that its JSON schema allows.
pub fn tool_call(
    tokenizer: &Tokenizer,
    function: &str,
    schema: &Value,
    seed: u64,
    max_tokens: usize,
) -> Answer {
    let mut chance = fastrand::Rng::with_seed(digest(&tokenizer.encode(function, false), seed));
    let arguments = value_for(schema, &mut chance, 0).to_string();
    let mut tokens = tokenizer.encode(
        &format!("{{\"name\": {}, \"parameters\": ", json!(function)),
        false,
    );
    let name_tokens = tokens.len();
    let argument_tokens = tokenizer.encode(&arguments, false);
    let mut pieces = vec![String::new(); name_tokens];
    pieces.extend(tokenizer.pieces(&argument_tokens));
    tokens.extend(argument_tokens);
    tokens.push(tokenizer.end_of_turn());
    pieces.push(String::new());
    let finish = if tokens.len() > max_tokens {
        Finish::Length
    } else {
        Finish::ToolCalls
    };
    tokens.truncate(max_tokens);
    pieces.truncate(max_tokens);
    Answer {
        tokens: tokens.into(),
        pieces,
        finish,
        call: Some(Call {
            function: function.to_owned(),
            name_tokens,
        }),
    }
}

fn value_for(schema: &Value, chance: &mut fastrand::Rng, depth: usize) -> Value {
    if depth > SCHEMA_DEPTH_MAX {
        return Value::Null;
    }
    if let Some(choices) = schema["enum"]
        .as_array()
        .filter(|choices| !choices.is_empty())
    {
        return choices[chance.usize(..choices.len())].clone();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.first().and_then(Value::as_str),
        kind => kind.as_str(),
    };
    match kind {
        Some("string") => json!(
            WORDS
                .split_whitespace()
                .nth(chance.usize(..500))
                .unwrap_or("word")
        ),
        Some("integer") => json!(
            schema["minimum"]
                .as_i64()
                .unwrap_or(0)
                .saturating_add(chance.i64(1..10))
        ),
        Some("number") => {
            json!(schema["minimum"].as_f64().unwrap_or(0.0) + f64::from(chance.u32(1..10)) / 2.0)
        }
        Some("boolean") => json!(chance.bool()),
        Some("array") => json!([value_for(&schema["items"], chance, depth + 1)]),
        Some("null") => Value::Null,
        _ => {
            let empty = Map::new();
            let properties = schema["properties"].as_object().unwrap_or(&empty);
            properties
                .iter()
                .map(|(name, inner)| (name.clone(), value_for(inner, chance, depth + 1)))
                .collect::<Map<_, _>>()
                .into()
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_tool_call_fits_its_schema() {
        let schema = json!({"type": "object", "properties": {
            "city": {"type": "string"}, "unit": {"enum": ["섭씨"]}, "days": {"type": "integer", "minimum": 1}, "where": {"type": "array", "items": {"type": "number"}}
        }});
        let answer = tool_call(Tokenizer::shared(), "get_weather", &schema, 0, 500);
        let arguments: Value = serde_json::from_str(&answer.pieces.concat()).unwrap();
        assert_eq!(arguments["unit"], "섭씨");
        assert!(
            arguments["city"].is_string()
                && arguments["days"].as_i64().unwrap() >= 1
                && arguments["where"][0].is_number()
        );
        assert_eq!(answer.finish, Finish::ToolCalls);
        assert_eq!(answer.pieces.len(), answer.tokens.len());
    }
}
