//! `/v1/embeddings`: made-up vectors, the same for the same tokens and close for texts that share many. They cost a prefill, no
//! decode.

use super::completions::Prompts;
use super::error::ApiError;
use super::generation::{Asked, Generation, Planned, usage};
use super::streaming::finished;
use super::{App, parse, prepare, unix_now};
use crate::text::{Answer, Finish};
use actix_web::{HttpRequest, HttpResponse, web};
use serde::Deserialize;
use serde_json::{Value, json};

/// Numbers in a vector where the request does not say.
const DIMENSIONS: usize = 256;
/// The largest of known embedding models.
const DIMENSIONS_MAX: usize = 8192;

#[derive(Debug, Deserialize)]
struct EmbeddingRequest {
    #[serde(default)]
    model: Option<String>,
    input: Prompts,
    #[serde(default)]
    encoding_format: Option<String>,
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
}

struct Prepared {
    model: String,
    prompts: Vec<Planned>,
    vectors: Vec<Value>,
}

/// The handler.
pub async fn serve(
    app: web::Data<App>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    app.admit().await?;
    let prepared = prepare(&app, payload, plan).await?;
    let tokens = prepared
        .prompts
        .iter()
        .map(|planned| planned.prompt.len())
        .sum();
    let asked = Asked {
        prompts: prepared.prompts,
        salt: String::new(),
        kv: None,
    };
    let mut generation = Generation::start(&app, &request, asked);
    if let Err(instead) = finished(&mut generation).await {
        return Ok(instead);
    }
    let data: Vec<Value> = prepared
        .vectors
        .into_iter()
        .enumerate()
        .map(|(index, embedding)| json!({"index": index, "object": "embedding", "embedding": embedding}))
        .collect();
    Ok(HttpResponse::Ok().json(json!({
        "id": app.answer_id("embd", &request), "object": "list", "created": unix_now(), "model": prepared.model,
        "data": data, "usage": usage(tokens, Some(0), None),
    })))
}

fn plan(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let request: EmbeddingRequest = parse(body)?;
    let model = app.check_model(request.model.as_deref())?;
    let dimensions = request.dimensions.unwrap_or(DIMENSIONS);
    if dimensions == 0 || dimensions > DIMENSIONS_MAX {
        return Err(ApiError::bad_field(
            "dimensions",
            format!("dimensions must be from 1 to {DIMENSIONS_MAX}, got {dimensions}."),
        ));
    }
    let base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(ApiError::bad_field(
                "encoding_format",
                format!("encoding_format must be float or base64, got {other}."),
            ));
        }
    };
    let prompts = request
        .input
        .into_tokens(app, request.add_special_tokens.unwrap_or(true))?;
    if let Some(long) = prompts
        .iter()
        .find(|prompt| prompt.len() > app.config.max_model_len)
    {
        return Err(ApiError::prompt_too_long(
            app.config.max_model_len,
            long.len(),
        ));
    }
    let vectors = prompts
        .iter()
        .map(|prompt| match (vector(prompt, dimensions), base64) {
            (numbers, false) => json!(numbers),
            (numbers, true) => json!(to_base64(
                &numbers
                    .iter()
                    .flat_map(|number| number.to_le_bytes())
                    .collect::<Vec<u8>>()
            )),
        })
        .collect();
    let nothing = || Answer {
        tokens: [].into(),
        pieces: Vec::new(),
        finish: Finish::Stop,
        call: None,
    };
    let prompts = prompts
        .into_iter()
        .map(|prompt| Planned {
            prompt: prompt.into(),
            answers: vec![nothing()],
        })
        .collect();
    Ok(Prepared {
        model,
        prompts,
        vectors,
    })
}

/// The sum of one random direction per token, of length 1.
fn vector(tokens: &[u32], dimensions: usize) -> Vec<f32> {
    let mut sum = vec![0.0f32; dimensions];
    for token in tokens {
        let mut chance = fastrand::Rng::with_seed(u64::from(*token));
        sum.iter_mut()
            .for_each(|number| *number += chance.f32() - 0.5);
    }
    let length = sum
        .iter()
        .map(|number| number * number)
        .sum::<f32>()
        .sqrt()
        .max(f32::MIN_POSITIVE);
    sum.iter_mut().for_each(|number| *number /= length);
    sum
}

/// RFC 4648 with padding.
fn to_base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group
            .iter()
            .fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        for position in 0..4 {
            match position <= group.len() {
                true => text.push(LETTERS[(bits >> (18 - 6 * position)) as usize & 63] as char),
                false => text.push('='),
            }
        }
    }
    text
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn base64_pads_as_the_standard_says() {
        let encoded: Vec<String> = ["", "f", "fo", "foo", "foob"]
            .iter()
            .map(|text| to_base64(text.as_bytes()))
            .collect();
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }

    #[test]
    fn texts_that_share_tokens_are_closer() {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let (a, near, far) = (
            vector(&[1, 2, 3, 4], 256),
            vector(&[1, 2, 3, 5], 256),
            vector(&[7, 8, 9, 10], 256),
        );
        assert!(dot(&a, &near) > dot(&a, &far));
        assert!((dot(&a, &a) - 1.0).abs() < 1e-3);
    }
}
