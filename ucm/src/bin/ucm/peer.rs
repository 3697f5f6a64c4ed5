//! `ucm peer`: serves this node's memory until it is asked to end.
//!
//! **Invariant:** it says that it serves only when it does.

use std::process::ExitCode;

use serde_json::json;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use ucm::{Config, Error, Peer};

pub(crate) fn run(config: &Config, standby: bool, as_json: bool) -> Result<ExitCode, Error> {
    // Before anything is begun that would have to be ended.
    let mut signals = Signals::new([SIGINT, SIGTERM])
        .map_err(|source| Error::Os { what: "wait for signals".into(), source })?;
    let handle = signals.handle();
    // Who only waits for its turn has nothing to leave.
    let waiting = std::thread::spawn(move || signals.forever().next());
    let peer = match standby {
        false => Peer::start(config, false)?,
        true => {
            let config = config.clone();
            let (sender, started) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                // Nobody hears it when this process was asked to end.
                let _ = sender.send(Peer::start(&config, true));
            });
            loop {
                match started.recv_timeout(std::time::Duration::from_millis(50)) {
                    Ok(peer) => break peer?,
                    Err(_) if waiting.is_finished() => return Ok(ExitCode::SUCCESS),
                    Err(_) => {}
                }
            }
        }
    };
    let text = |address: Option<std::net::SocketAddr>| address.map(|address| address.to_string());
    let (address, directory, metrics) =
        (text(peer.address()), text(peer.directory_address()), text(peer.metrics_address()));
    if as_json {
        let said = json!({"address": address, "directory": directory, "metrics": metrics});
        crate::print(&format!("{said}\n"));
    } else {
        let or = |address: Option<String>| address.unwrap_or_else(|| "nobody".into());
        crate::print(&format!(
            "serves other nodes at {}, its directory at {}, metrics at {}\n",
            or(address),
            or(directory),
            or(metrics)
        ));
    }
    let _ = waiting.join();
    handle.close();
    drop(peer);
    Ok(ExitCode::SUCCESS)
}
