//! The programs under measurement.

use actix_web::{App, HttpResponse, HttpServer, web};
use bytes::Bytes;
use cost_ladder::engine::json_body;
use gateway::settings::{self, Environment, Source};
use std::io;

/// Bytes of text in an answer, so that the whole of it is 2 KB.
pub const TEXT_BYTES: usize = 1770;
/// Where the engine listens.
pub const ENGINE_PORT: u16 = 18_911;
/// Where what is measured listens.
pub const PORT: u16 = 18_912;

/// What actix-web can do at most: reads the body, answers with the same bytes each time.
pub fn constant(port: u16) -> io::Result<()> {
    let body = Bytes::from(json_body(TEXT_BYTES));
    actix_rt::System::new().block_on(
        HttpServer::new(move || {
            let body = body.clone();
            App::new().default_service(web::to(move |_request: Bytes| {
                let body = body.clone();
                async move {
                    HttpResponse::Ok()
                        .content_type("application/json")
                        .body(body)
                }
            }))
        })
        .tcp_nodelay(true)
        .h1_allow_half_closed(false)
        .bind(("127.0.0.1", port))?
        .run(),
    )
}

/// The router with these settings.
pub fn router(text: String) -> io::Result<()> {
    let source = Source {
        name: "cache-bench".into(),
        text,
    };
    let loaded = settings::load(&[source], &Environment::new());
    let loaded = loaded.map_err(|faults| io::Error::other(faults.to_string()))?;
    std::process::exit(gateway::startup::run(loaded.settings))
}

/// Settings of a router in front of the engine, with this cache.
pub fn settings(cache: &str) -> String {
    format!(
        "server: {{host: 127.0.0.1, port: {PORT}}}\nbackends: [{{name: e, url: 'http://127.0.0.1:{ENGINE_PORT}', models: [m]}}]\nhealth_checks: {{enabled: false}}\n{cache}"
    )
}
