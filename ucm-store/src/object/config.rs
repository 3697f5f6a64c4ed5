//! Settings of the object store backend.
//!
//! **Invariant:** what cannot work is refused when the backend is opened, not later.

use std::{fmt, time::Duration};

/// Settings of an [`ObjectBackend`](crate::ObjectBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct ObjectConfig {
    /// `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///directory`. Several
    /// processes, and several namespaces, may share it.
    pub url: String,
    /// Settings of the service by their usual names (`aws_endpoint`, `aws_region`, `google_service_account`,
    /// `azure_storage_account_name`, …). They win over the environment, which is where credentials come
    /// from otherwise: `AWS_*`, `GOOGLE_*`, `AZURE_*`, then the metadata service of the machine.
    pub options: Vec<(String, String)>,
    /// Everything that determines the bytes of an object besides its key, at most 4008 bytes. Stored with
    /// every object and compared on every load.
    pub descriptor: Vec<u8>,
    /// Operations on their way at once; at least one. Default 32. Each dump holds a copy of its bytes.
    pub concurrency: usize,
    /// Threads of the runtime; at least one. Default 2.
    pub threads: usize,
    /// Longer objects are written and read in parts of so many bytes, some at once; 5 MiB at least
    /// (services refuse smaller ones). Default 8 MiB.
    pub part_bytes: usize,
    /// Longest time of a load or dump, with all its tries. Default 30 s.
    pub deadline: Duration,
    /// Tries after the first one, for each request. Default 3.
    pub retries: usize,
    /// Longest time that `contains` and `remove` wait for their answers. Default 5 s.
    pub answer_within: Duration,
    /// How long dropping the backend waits for what has begun. Default 5 s.
    pub close_within: Duration,
}

/// Least bytes of a part.
const LEAST_PART: usize = 5 << 20;

impl ObjectConfig {
    /// Objects of the namespace `descriptor` at `url`.
    pub fn new(url: impl Into<String>, descriptor: impl Into<Vec<u8>>) -> Self {
        Self {
            url: url.into(),
            options: Vec::new(),
            descriptor: descriptor.into(),
            concurrency: 32,
            threads: 2,
            part_bytes: 8 << 20,
            deadline: Duration::from_secs(30),
            retries: 3,
            answer_within: Duration::from_secs(5),
            close_within: Duration::from_secs(5),
        }
    }

    /// Adds a setting of the service.
    #[must_use]
    pub fn option(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options.push((name.into(), value.into()));
        self
    }

    /// Sets the operations on their way at once.
    #[must_use]
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency.max(1);
        self
    }

    /// Sets the threads of the runtime.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets the bytes of a part; 5 MiB at least.
    #[must_use]
    pub fn part_bytes(mut self, bytes: usize) -> Self {
        self.part_bytes = bytes.max(LEAST_PART);
        self
    }

    /// Sets the longest time of a load or dump.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the tries after the first one.
    #[must_use]
    pub fn retries(mut self, retries: usize) -> Self {
        self.retries = retries;
        self
    }

    /// Sets how long dropping waits for what has begun.
    #[must_use]
    pub fn close_within(mut self, time: Duration) -> Self {
        self.close_within = time;
        self
    }

    /// Sets the longest wait of `contains` and `remove`.
    #[must_use]
    pub fn answer_within(mut self, time: Duration) -> Self {
        self.answer_within = time;
        self
    }
}

impl fmt::Debug for ObjectConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be secrets.
        let names: Vec<&str> = self.options.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("ObjectConfig")
            .field("url", &self.url)
            .field("options", &names)
            .field("concurrency", &self.concurrency)
            .field("part_bytes", &self.part_bytes)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
