//! `api_keys`: who may ask. Keys are hashed as they are read; nothing keeps them as they are.

use super::quotas::limits;
use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use crate::settings::units;
use routing::access::{ApiKey, KeyDigest, KeyMode, Scope};
use routing::quota::Priority;

/// A shorter key can be guessed.
const KEY_LENGTH_MIN: usize = 16;
const SCOPES: [(&str, Scope); 3] = [
    ("inference", Scope::Inference),
    ("models", Scope::Models),
    ("admin", Scope::Admin),
];

const PRIORITIES: [(&str, Priority); 3] = [
    ("high", Priority::High),
    ("normal", Priority::Normal),
    ("low", Priority::Low),
];

/// `api_keys`.
#[derive(Debug, Clone)]
pub struct ApiKeySettings {
    /// What becomes of requests without one.
    pub mode: KeyMode,
    /// Those that are written here.
    pub keys: Vec<ApiKey>,
    /// Where more are written.
    pub file: Option<String>,
}

impl ApiKeySettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let modes = [
            ("blocking", KeyMode::Blocking),
            ("permissive", KeyMode::Permissive),
        ];
        ApiKeySettings {
            mode: s.choice("mode", &modes, "blocking", "blocking refuses requests without a key of this list; permissive serves them as if there were none, and passes their credentials to the engines. Without keys nothing is asked for."),
            file: s.text_or_none("file", "A YAML file with more of them, as a list under `keys`."),
            keys: s.list("keys", "Clients send one as `Authorization: Bearer` or as `x-api-key`. It never reaches an engine.").iter().map(key).collect(),
        }
    }

    /// Whether keys are asked for at all.
    pub fn is_on(&self) -> bool {
        !self.keys.is_empty() || self.file.is_some()
    }

    pub(in crate::settings) fn check(&self, faults: &mut Vec<Fault>) {
        check_unique(&self.keys, faults);
    }
}

/// Names stand for keys in logs, and a key that stands twice would have two owners.
pub fn check_unique(keys: &[ApiKey], faults: &mut Vec<Fault>) {
    for (i, key) in keys.iter().enumerate() {
        let earlier = || keys[..i].iter().enumerate();
        if let Some((j, _)) = earlier().find(|(_, other)| other.name == key.name) {
            let what = format!("`{}` is also the name of api_keys.keys[{j}]", key.name);
            faults.push(Fault::new(format!("api_keys.keys[{i}].name"), what));
        }
        if let Some((j, _)) = earlier().find(|(_, other)| other.digest == key.digest) {
            let what = format!("is the same key as api_keys.keys[{j}]");
            faults.push(Fault::new(format!("api_keys.keys[{i}]"), what));
        }
    }
}

fn key(s: &Section<'_>) -> ApiKey {
    let name = s.required("name", "Unique; appears in the log.");
    let plain = s.secret("key", "The key itself, best from a variable.");
    let digits = s.text_or_none(
        "sha256",
        "In its place the SHA-256 of the key, as 64 hexadecimal digits.",
    );
    if plain.as_ref().is_some_and(|key| key.len() < KEY_LENGTH_MIN) {
        s.fault(
            "key",
            format!("must have at least {KEY_LENGTH_MIN} characters"),
        );
    }
    let digest = match (&plain, &digits) {
        (Some(key), None) => KeyDigest::of(key.as_bytes()),
        (None, Some(digits)) => KeyDigest::from_hex(digits).unwrap_or_else(|| {
            s.fault("sha256", "must be 64 hexadecimal digits");
            KeyDigest::of(b"")
        }),
        _ => {
            if !name.is_empty() {
                s.fault("key", "is required, or sha256 in its place, and not both");
            }
            KeyDigest::of(name.as_bytes())
        }
    };
    let tenant = s.text_or_none(
        "tenant",
        "Whose it is: tenants never see each other's cached answers. Default: the key's name.",
    );
    let words = s.texts(
        "scopes",
        "What it opens: inference, models, admin. Default: inference and models.",
    );
    let scopes = words.iter().filter_map(|word| {
        let found = SCOPES.iter().find(|(name, _)| *name == &**word);
        if found.is_none() {
            s.fault(
                "scopes",
                format!("`{word}` is not one of inference, models, admin"),
            );
        }
        found.map(|(_, scope)| *scope)
    });
    let scopes: Vec<Scope> = scopes.collect();
    let expires = s.text_or_none("expires", "The day on which it ends, as 2027-01-31, at 00:00 UTC, or the moment, as 2027-01-31T12:00:00Z.");
    ApiKey {
        tenant: tenant.unwrap_or_else(|| name.clone()).into(),
        name: name.into(),
        digest,
        scopes: match scopes.is_empty() {
            true => vec![Scope::Inference, Scope::Models],
            false => scopes,
        },
        models: s.texts(
            "models",
            "The models that it may ask for, by their own names or aliases; empty: all.",
        ),
        limits: limits(&s.section(
            "limits",
            "What may be asked for with it; default: quotas.key.",
        )),
        priority: s.choice(
            "priority",
            &PRIORITIES,
            "normal",
            "high, normal or low: who goes first where requests wait (quotas.queue).",
        ),
        expires: expires.and_then(|text| {
            let moment = units::moment(&text);
            if moment.is_none() {
                s.fault(
                    "expires",
                    "must be a day, as 2027-01-31, or a moment, as 2027-01-31T12:00:00Z",
                );
            }
            moment
        }),
    }
}
