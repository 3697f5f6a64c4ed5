//! The process that owns all objects.
//!
//! Owns: a peer's medium with the objects, and for the baseline an export of the same bytes.
//! **Invariant:** both serve the same bytes.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use ucm_data::{Segments, SegmentsConfig};
use ucm_remote::{
    Agent, ByteRange, EmbeddedDirectory, EmbeddedLimits, HostMedium, PagedLimits, PeerId,
    PutRequest, RemotePool as _, Source,
};
use ucm_transport::{
    Access, Addr, Exports, HostEngine, Memory, Pieces, Refusal, Request, Secret, Serve, Served,
    Session, TcpServer, TcpServerConfig, TransferEngine as _,
};

use super::{
    peer_error, soon,
    spec::{Reply, Spec, content, key},
};
use crate::error::BenchError;

pub(crate) const NAME: &str = "owner";

/// Kept until the parent leaves.
pub(crate) struct Owner {
    _agent: Agent,
    _baseline: Option<TcpServer>,
}

/// Memory for so many pages that other processes can map.
pub(crate) fn shared(page_bytes: u64, pages: u64) -> Result<Segments, BenchError> {
    let pages = u32::try_from(pages)
        .map_err(|_| BenchError::Usage("too many pages for one medium".into()))?;
    let mut config = SegmentsConfig::new(page_bytes, pages);
    // A pool of any size, and no huge pages that others wait for.
    config.segment_bytes = 4 << 30;
    config.prefer = ucm_data::PageTier::Transparent;
    Segments::create(&config).map_err(|e| BenchError::Environment(e.to_string()))
}

/// Pages that hold all objects, and some more.
pub(crate) fn pages(spec: &Spec) -> u64 {
    spec.all().iter().map(|(_, _, len)| len.div_ceil(spec.page_bytes)).sum::<u64>() + 64
}

impl Owner {
    pub(crate) fn open(
        spec: &Spec,
        secret: &[u8],
        socket: Option<PathBuf>,
        baseline: bool,
    ) -> Result<(Self, Reply), BenchError> {
        let secret = Secret::new(secret).map_err(peer_error)?;
        let segments = shared(spec.page_bytes, pages(spec))?;
        let medium = HostMedium::shared(&segments, PagedLimits::new(spec.page_bytes))
            .map_err(|e| BenchError::Environment(e.to_string()))?;
        let directory = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut agent = Agent::builder(PeerId::new(NAME), medium, directory, secret.clone())
            .listen(local)
            .start()
            .map_err(peer_error)?;
        if let Some(socket) = socket {
            agent.serve_ranks(&socket).map_err(peer_error)?;
        }
        let mut reply = Reply {
            address: agent.address(),
            boot: agent.boot().map_or([0; 16], |boot| boot.0),
            ..Reply::default()
        };
        let (total, largest) =
            spec.all().iter().fold((0, 0), |(sum, most), (_, _, len)| (sum + len, most.max(*len)));
        let memory = |bytes: u64| Memory::host(usize::try_from(bytes).unwrap_or(usize::MAX));
        let engine = Arc::new(HostEngine::builder().build().map_err(peer_error)?);
        let client = agent.client(Arc::clone(&engine) as _).map_err(peer_error)?;
        let source = memory(largest).map_err(peer_error)?;
        let region = engine.register(source.clone()).map_err(peer_error)?;
        let export = if baseline { Some(memory(total).map_err(peer_error)?) } else { None };
        let mut at = 0;
        for (number, _, len) in spec.all() {
            let length = usize::try_from(len).unwrap_or(usize::MAX);
            let mut bytes = vec![0; length];
            content(number, 0, &mut bytes);
            source.write(0, &bytes).map_err(peer_error)?;
            if let Some(export) = &export {
                export.write(at, &bytes).map_err(peer_error)?;
                at += length;
            }
            let range = ByteRange { offset: 0, len };
            let ranges = vec![Source { range, from: Addr { region, offset: 0 } }];
            let put = client.put(&[PutRequest { key: key(number), len, ranges }], soon());
            if !put.iter().all(|outcome| outcome.is_stored()) {
                return Err(BenchError::Peer(format!("object {number}: {put:?}")));
            }
            let found = agent.medium().medium().find(&key(number));
            reply.generations.push(found.map_or(0, |(generation, _)| generation.0));
        }
        let server = match export {
            None => None,
            Some(export) => {
                let exports = Exports::default();
                let token = exports.export(export, Access::Read).map_err(peer_error)?;
                reply.token = token.0;
                let config = TcpServerConfig::new(secret);
                let server = TcpServer::bind(local, config, Arc::new(Answering(exports)));
                Some(server.map_err(peer_error)?)
            }
        };
        reply.baseline = server.as_ref().map(TcpServer::address);
        Ok((Self { _agent: agent, _baseline: server }, reply))
    }
}

/// The export, and an answer of the usual size to whoever resolves keys first.
struct Answering(Exports);

impl Serve for Answering {
    fn read(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        self.0.read(request, pieces)
    }

    fn call(&self, _: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        reply.resize(request.len() / 48 * 17, 0);
        Ok(())
    }
}
