//! Engines over a device, and memory for the conformance suite on either side of it.

use std::sync::Arc;

use ucm_transport::{
    DeviceEngine, DeviceEngineBuilder, Gpu, Location, Memory, TransferEngine, testing::Harness,
};

/// Which memory a side of the suite uses.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Host,
    Device(Gpu),
}

impl Place {
    fn memory(&self, len: usize) -> Memory {
        match self {
            Self::Host => Memory::host(len).unwrap(),
            Self::Device(gpu) => gpu.alloc(len).unwrap(),
        }
    }
}

/// Engines of one device with the same settings.
pub(crate) struct OnDevice<F> {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) source: Place,
    pub(crate) destination: Place,
    pub(crate) settings: F,
}

impl<F> OnDevice<F> {
    fn owner(&self, memory: &Memory) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.location() == memory.location())
    }
}

impl<F: Fn(DeviceEngineBuilder) -> DeviceEngineBuilder> Harness for OnDevice<F> {
    fn engine(&self) -> Arc<dyn TransferEngine> {
        Arc::new((self.settings)(DeviceEngine::builder(&self.gpus[0])).build().unwrap())
    }

    fn source(&self, len: usize) -> Memory {
        self.source.memory(len)
    }

    fn destination(&self, len: usize) -> Memory {
        self.destination.memory(len)
    }

    fn read(&self, memory: &Memory, offset: usize, into: &mut [u8]) {
        match (self.owner(memory), memory.location()) {
            (Some(gpu), _) => gpu.read(memory, offset, into).unwrap(),
            (None, Location::Host) => memory.read(offset, into).unwrap(),
            (None, other) => panic!("memory of {other:?}"),
        }
    }

    fn write(&self, memory: &Memory, offset: usize, from: &[u8]) {
        match (self.owner(memory), memory.location()) {
            (Some(gpu), _) => gpu.write(memory, offset, from).unwrap(),
            (None, Location::Host) => memory.write(offset, from).unwrap(),
            (None, other) => panic!("memory of {other:?}"),
        }
    }
}

/// Bytes that tell where they come from.
pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at * 31 + at / 251 + seed * 97) % 251).unwrap()).collect()
}
