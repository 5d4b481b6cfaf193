//! S3 as rusoto speaks it: the one file that knows rusoto.
//!
//! rusoto makes requests, signs them, and reads what succeeded. It never sees the network: each call gets a dispatcher of its own
//! over our transport, which also keeps what went wrong, since rusoto's errors would not say. And it sees no headers of an answer,
//! because it panics on some that it cannot read.

use super::settings::Credentials;
use super::transport::{Failure, Transport};
use super::verdict::{Setback, is_well_formed, refusal};
use bytes::{Bytes, BytesMut};
use chrono::DateTime;
use futures_util::{FutureExt, TryStreamExt, stream};
use http::{Request, Response, header};
use http_body_util::Full;
use rusoto_core::credential::StaticProvider;
use rusoto_core::request::{DispatchSignedRequestFuture, HttpResponse};
use rusoto_core::signature::{SignedRequest, SignedRequestPayload};
use rusoto_core::{ByteStream, DispatchSignedRequest, HttpDispatchError, Region, RusotoError};
use rusoto_s3::{
    Delete, DeleteObjectRequest, DeleteObjectsRequest, GetObjectRequest, ListObjectsV2Request,
    Object, ObjectIdentifier, PutObjectRequest, S3, S3Client,
};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

/// How a user of the store is named in its log.
const USER_AGENT: &str = concat!("tidegate/", env!("CARGO_PKG_VERSION"));

/// One bucket of an object store.
pub(super) struct Bucket {
    name: String,
    region: Region,
    credentials: Arc<StaticProvider>,
    transport: Arc<Transport>,
}

/// A page of a bucket.
#[derive(Default)]
pub(super) struct FoundPage {
    pub(super) objects: Vec<FoundName>,
    pub(super) next: Option<String>,
}

/// An object of a page.
pub(super) struct FoundName {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) stored_at: SystemTime,
}

impl Bucket {
    pub(super) fn new(
        name: &str,
        region: &str,
        endpoint: String,
        credentials: Credentials,
        transport: Transport,
    ) -> Self {
        let Credentials {
            access_key,
            secret_key,
            session_token,
        } = credentials;
        Bucket {
            name: name.to_owned(),
            region: Region::Custom {
                name: region.to_owned(),
                endpoint,
            },
            credentials: Arc::new(StaticProvider::new(
                access_key,
                secret_key,
                session_token,
                None,
            )),
            transport: Arc::new(transport),
        }
    }

    pub(super) async fn get(&self, object: String) -> Result<Bytes, Setback> {
        let request = GetObjectRequest {
            bucket: self.name.clone(),
            key: object,
            ..Default::default()
        };
        let found = self
            .call(|s3| async move { s3.get_object(request).await })
            .await?;
        match found.body {
            Some(body) => collect(body)
                .await
                .map_err(|error| broken(&error.to_string())),
            None => Ok(Bytes::new()),
        }
    }

    /// The signature covers the request without its body: against changes on the way there is https, against accidents the
    /// value's own checksum.
    pub(super) async fn put(&self, object: String, bytes: Bytes) -> Result<(), Setback> {
        let size = bytes.len();
        let body = ByteStream::new_with_size(stream::once(async move { Ok(bytes) }), size);
        let request = PutObjectRequest {
            bucket: self.name.clone(),
            key: object,
            body: Some(body),
            ..Default::default()
        };
        self.call(|s3| async move { s3.put_object(request).await })
            .await
            .map(drop)
    }

    pub(super) async fn delete(&self, object: String) -> Result<(), Setback> {
        let request = DeleteObjectRequest {
            bucket: self.name.clone(),
            key: object,
            ..Default::default()
        };
        self.call(|s3| async move { s3.delete_object(request).await })
            .await
            .map(drop)
    }

    /// Deletes up to a page of objects in one request. Gives how many the store says are gone.
    pub(super) async fn delete_all(&self, objects: Vec<String>) -> Result<usize, Setback> {
        let identifier = |key| ObjectIdentifier {
            key,
            version_id: None,
        };
        let objects = objects.into_iter().map(identifier).collect();
        let request = DeleteObjectsRequest {
            bucket: self.name.clone(),
            delete: Delete {
                objects,
                quiet: Some(false),
            },
            ..Default::default()
        };
        let done = self
            .call(|s3| async move { s3.delete_objects(request).await })
            .await?;
        Ok(done.deleted.map_or(0, |deleted| deleted.len()))
    }

    pub(super) async fn list(
        &self,
        prefix: String,
        after: Option<String>,
        limit: usize,
    ) -> Result<FoundPage, Setback> {
        let request = ListObjectsV2Request {
            bucket: self.name.clone(),
            prefix: Some(prefix),
            continuation_token: after,
            max_keys: Some(limit as i64),
            ..Default::default()
        };
        let found = self
            .call(|s3| async move { s3.list_objects_v2(request).await })
            .await?;
        // rusoto takes any document for an empty page
        let truncated = found
            .is_truncated
            .ok_or_else(|| broken("a page of something else"))?;
        let next = found.next_continuation_token.filter(|_| truncated);
        if truncated && next.is_none() {
            return Err(broken("a page that goes on without saying where"));
        }
        Ok(FoundPage {
            objects: found
                .contents
                .unwrap_or_default()
                .into_iter()
                .filter_map(found_name)
                .collect(),
            next,
        })
    }

    /// One call over a dispatcher of its own, which says afterwards what the answer was.
    async fn call<T, E, F>(&self, act: impl FnOnce(S3Client) -> F) -> Result<T, Setback>
    where
        F: Future<Output = Result<T, RusotoError<E>>>,
    {
        let exchange = Exchange {
            transport: self.transport.clone(),
            setback: Arc::default(),
        };
        let client = S3Client::new_with(
            exchange.clone(),
            self.credentials.clone(),
            self.region.clone(),
        );
        // rusoto's readers panic on numbers that are none
        let done = AssertUnwindSafe(act(client)).catch_unwind().await;
        match done {
            Ok(Ok(answer)) => Ok(answer),
            _ => Err(exchange
                .setback
                .get()
                .cloned()
                .unwrap_or_else(|| broken("an answer that is not S3's"))),
        }
    }
}

fn broken(what: &str) -> Setback {
    Setback::Failed(Failure::Broken(what.to_owned()))
}

fn found_name(object: Object) -> Option<FoundName> {
    let stored_at = DateTime::parse_from_rfc3339(&object.last_modified?).ok()?;
    Some(FoundName {
        name: object.key?,
        bytes: u64::try_from(object.size?).ok()?,
        stored_at: stored_at.into(),
    })
}

/// A body in one piece. All of ours have a single chunk, which is not copied.
async fn collect(mut body: ByteStream) -> std::io::Result<Bytes> {
    let first = body.try_next().await?.unwrap_or_default();
    let Some(second) = body.try_next().await? else {
        return Ok(first);
    };
    let mut all = BytesMut::from(first);
    all.extend_from_slice(&second);
    while let Some(chunk) = body.try_next().await? {
        all.extend_from_slice(&chunk);
    }
    Ok(all.freeze())
}

/// The way of one request, and what became of it.
#[derive(Clone)]
struct Exchange {
    transport: Arc<Transport>,
    setback: Arc<OnceLock<Setback>>,
}

impl DispatchSignedRequest for Exchange {
    // the timeout is rusoto's, which nobody sets; a call's is around all of it
    fn dispatch(
        &self,
        request: SignedRequest,
        _: Option<std::time::Duration>,
    ) -> DispatchSignedRequestFuture {
        let exchange = self.clone();
        Box::pin(async move {
            exchange.send(request).await.map_err(|setback| {
                let _ = exchange.setback.set(setback); // one request a call
                HttpDispatchError::new("see the exchange's setback".into())
            })
        })
    }
}

impl Exchange {
    async fn send(&self, request: SignedRequest) -> Result<HttpResponse, Setback> {
        // of our requests, those with a query get a document that rusoto reads
        let reads_document = !request.canonical_query_string().is_empty();
        let request = to_http(request)
            .await
            .map_err(|error| broken(&error.to_string()))?;
        let answer = self
            .transport
            .send(request)
            .await
            .map_err(Setback::Failed)?;
        match refusal(&answer) {
            Some(refusal) => Err(Setback::Answered(refusal)),
            None if reads_document && !is_well_formed(answer.body()) => {
                Err(broken("a document that is not whole"))
            }
            None => Ok(to_rusoto(answer)),
        }
    }
}

async fn to_http(
    signed: SignedRequest,
) -> Result<Request<Full<Bytes>>, Box<dyn std::error::Error + Send + Sync>> {
    let (scheme, host, path) = (signed.scheme(), signed.hostname(), signed.canonical_path());
    let uri = match signed.canonical_query_string() {
        "" => format!("{scheme}://{host}{path}"),
        query => format!("{scheme}://{host}{path}?{query}"),
    };
    let mut builder = Request::builder().method(signed.method()).uri(uri);
    for (name, values) in signed.headers() {
        for value in values {
            builder = builder.header(name, value.as_slice());
        }
    }
    builder = builder.header(header::USER_AGENT, USER_AGENT);
    let body = match signed.payload {
        Some(SignedRequestPayload::Buffer(bytes)) => bytes,
        Some(SignedRequestPayload::Stream(stream)) => collect(stream).await?,
        None => Bytes::new(),
    };
    Ok(builder.body(Full::new(body))?)
}

/// Hands rusoto the body, and no headers: it needs none.
fn to_rusoto(answer: Response<Bytes>) -> HttpResponse {
    let body = answer.into_body();
    HttpResponse {
        status: Default::default(), // 200: every success is one to rusoto
        headers: Default::default(),
        body: ByteStream::new(stream::once(async move { Ok(body) })),
    }
}
