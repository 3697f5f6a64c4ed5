//! Dumps: one request, or several parts that become an object together.
//!
//! **Invariant:** what is sent is a private copy, hashed before the first byte leaves. An object that is
//! there is replaced only by other bytes.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use object_store::{
    GetOptions, GetRange, ObjectStore as _, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    path::Path,
};

use super::{Inner, failed, is_unsupported};
use crate::{
    Op, StoreError,
    header::{HEADER_BYTES, Header, HeaderBlock},
    op,
    xxh3::xxh3_64,
};

impl Inner {
    pub(super) async fn dump(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        let mut payload = vec![0; op.memory().len()];
        op.memory().read(0, &mut payload)?;
        let header = Header {
            block: *op.block(),
            shard: op.shard(),
            generation: self.generations.next(),
            payload_bytes: payload.len() as u64,
            payload_hash: xxh3_64(&payload),
            descriptor: &self.descriptor,
        };
        let path = self.path(&(*op.block(), op.shard()));
        let head = Bytes::copy_from_slice(&header.encode().0);
        let payload = Bytes::from(payload);
        if payload.len() > self.part_bytes {
            // To send it all only to hear that it is there would cost more than to ask.
            if self.is_same(&path, &header).await {
                self.counters.deduplicated.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            return self.put_parts(&path, head, payload).await;
        }
        let body = || PutPayload::from_iter([head.clone(), payload.clone()]);
        if self.creates.load(Ordering::Relaxed) {
            match self.put(&path, body(), true).await {
                Ok(()) => return Ok(()),
                Err(object_store::Error::AlreadyExists { .. }) => {
                    if self.is_same(&path, &header).await {
                        self.counters.deduplicated.fetch_add(1, Ordering::Relaxed);
                        return Ok(());
                    }
                    self.counters.replaced.fetch_add(1, Ordering::Relaxed);
                }
                Err(e) if is_unsupported(&e) => self.creates.store(false, Ordering::Relaxed),
                Err(e) => return Err(failed("put", &e)),
            }
        }
        self.put(&path, body(), false).await.map_err(|e| failed("put", &e))
    }

    pub(super) async fn put(
        &self,
        path: &Path,
        payload: PutPayload,
        create: bool,
    ) -> object_store::Result<()> {
        let mode = if create { PutMode::Create } else { PutMode::Overwrite };
        let options = PutOptions { mode, ..PutOptions::default() };
        self.store.put_opts(path, payload, options).await.map(|_| ())
    }

    /// Whether the object that is there has this length and hash, as its header says. (If its payload is
    /// damaged, the load that finds out takes it away.)
    async fn is_same(&self, path: &Path, header: &Header<'_>) -> bool {
        let range = Some(GetRange::Bounded(0..HEADER_BYTES as u64));
        let options = GetOptions { range, ..GetOptions::default() };
        let Ok(got) = self.store.get_opts(path, options).await else { return false };
        let size = got.meta.size;
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        match got.bytes().await {
            Ok(bytes) if bytes.len() == HEADER_BYTES => block.0.copy_from_slice(&bytes),
            _ => return false,
        }
        Header::parse(&block).is_ok_and(|there| {
            let same = (there.payload_bytes, there.payload_hash)
                == (header.payload_bytes, header.payload_hash);
            same && size == there.payload_bytes + HEADER_BYTES as u64
                && there.check_identity(&header.block, header.shard, &self.descriptor).is_ok()
        })
    }

    async fn put_parts(&self, path: &Path, head: Bytes, payload: Bytes) -> Result<(), StoreError> {
        let options = PutMultipartOptions::default();
        let upload = self.store.put_multipart_opts(path, options).await;
        let mut upload = upload.map_err(|e| failed("begin of an upload", &e))?;
        let mut done = Ok(());
        for from in (0..payload.len()).step_by(self.part_bytes) {
            let part = payload.slice(from..(from + self.part_bytes).min(payload.len()));
            // The header goes with the first part, so that all but the last have at least the least size.
            let head = (from == 0).then(|| head.clone());
            let body: PutPayload = head.into_iter().chain([part]).collect();
            done = upload.put_part(body).await;
            if done.is_err() {
                break;
            }
        }
        let ended = match done {
            Ok(()) => upload.complete().await.map(|_| ()),
            Err(e) => Err(e),
        };
        ended.map_err(|e| failed("upload", &e)).inspect_err(|_| {
            let abort = async move {
                if let Err(error) = upload.abort().await {
                    tracing::warn!(%error, "parts of an upload stay in the store");
                }
            };
            tokio::spawn(abort);
        })
    }
}
