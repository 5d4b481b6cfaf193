//! An engine's way to a store: in the same process, or over HTTP.

use super::{Blocks, NamespaceStore};
use crate::http_client;
use serde_json::Value;
use std::sync::Arc;

/// Where the store is.
#[derive(Debug, Clone)]
pub enum StoreClient {
    /// In this process.
    Here(Arc<NamespaceStore>),
    /// Behind a URL without a slash at the end.
    There(String),
}

impl StoreClient {
    /// Reads leading blocks; answers how many.
    ///
    /// # Errors
    /// One sentence about why it did not answer.
    pub async fn get(&self, blocks: &Blocks) -> Result<usize, String> {
        match self {
            Self::Here(store) => store.get(blocks).await.map_err(refused),
            Self::There(url) => ask(url, "get", blocks, "leading").await,
        }
    }

    /// Writes blocks; answers how many were new.
    ///
    /// # Errors
    /// One sentence about why it did not answer.
    pub async fn put(&self, blocks: &Blocks) -> Result<usize, String> {
        match self {
            Self::Here(store) => store.put(blocks).await.map_err(refused),
            Self::There(url) => ask(url, "put", blocks, "written").await,
        }
    }
}

async fn ask(url: &str, act: &str, blocks: &Blocks, counted: &str) -> Result<usize, String> {
    let body = serde_json::to_value(blocks).map_err(|fault| fault.to_string())?;
    let (status, answer) = http_client::post(&format!("{url}/v1/blocks/{act}"), &body).await?;
    match answer.get(counted).and_then(Value::as_u64) {
        Some(count) if status == 200 => Ok((count as usize).min(blocks.hashes.len())),
        _ => Err(refused(status)),
    }
}

fn refused(status: u16) -> String {
    format!("the store answered {status}")
}
