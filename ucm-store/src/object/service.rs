//! The service behind a URL.
//!
//! **Invariant:** settings given win over the environment; every request is bounded in time and tries.

use std::{sync::Arc, time::Duration};

use object_store::{
    BackoffConfig, ObjectStore, RetryConfig, aws::AmazonS3Builder, azure::MicrosoftAzureBuilder,
    gcp::GoogleCloudStorageBuilder, local::LocalFileSystem, path::Path,
};

use super::ObjectConfig;
use crate::{ErrorKind, StoreError};

/// Longest time to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// The service, and where in it the store lies.
pub(super) fn connect(config: &ObjectConfig) -> Result<(Arc<dyn ObjectStore>, Path), StoreError> {
    let invalid = |what: String| StoreError::new(ErrorKind::Invalid, what);
    let url = &config.url;
    let shape = || {
        invalid(format!(
            "{url:?} names no object store: it must be s3://bucket/prefix, gs://bucket/prefix, \
             az://container/prefix or file:///directory"
        ))
    };
    let (scheme, rest) = url.split_once("://").ok_or_else(shape)?;
    if scheme == "file" {
        std::fs::create_dir_all(rest).map_err(|e| {
            StoreError::new(ErrorKind::Io, format!("{rest} cannot be created: {e}"))
        })?;
        let store = LocalFileSystem::new_with_prefix(rest).map_err(|e| invalid(e.to_string()))?;
        return Ok((Arc::new(store), Path::default()));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(shape());
    }
    let prefix = Path::parse(prefix.trim_matches('/')).map_err(|e| invalid(e.to_string()))?;
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(5), ..BackoffConfig::default() },
        max_retries: config.retries,
        retry_timeout: config.deadline,
    };
    // One that is there already (with the same provider, or another) serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let times = [("timeout", config.deadline), ("connect_timeout", CONNECT.min(config.deadline))];
    let times = times.map(|(name, time)| (name.to_owned(), format!("{} ms", time.as_millis())));
    let options = || times.iter().chain(&config.options);
    let bad = |e: object_store::Error| invalid(format!("{url}: {e}"));
    macro_rules! build {
        ($builder:expr) => {{
            let mut builder = $builder.with_retry(retry);
            for (name, value) in options() {
                builder = builder.with_config(name.to_lowercase().parse().map_err(bad)?, value);
            }
            Arc::new(builder.build().map_err(bad)?)
        }};
    }
    let store: Arc<dyn ObjectStore> = match scheme {
        "s3" => build!(AmazonS3Builder::from_env().with_bucket_name(bucket)),
        "gs" => build!(GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket)),
        "az" => build!(MicrosoftAzureBuilder::from_env().with_container_name(bucket)),
        _ => return Err(shape()),
    };
    Ok((store, prefix))
}
