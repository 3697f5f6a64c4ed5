//! Over an S3 service of another make: `moto_server`, where it is installed.
//!
//! **Invariant:** credentials come from the environment of a process of its own.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use super::*;

const ADDRESS: &str = "UCM_TEST_S3";

struct Moto {
    child: Child,
    address: String,
}

impl Moto {
    /// `None`, and why, if there is none.
    fn start() -> Result<Self, String> {
        let mut command = Command::new("moto_server");
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| {
            format!(
                "moto_server cannot be started ({e}); it comes with: pip install 'moto[server]'"
            )
        })?;
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let address = lines.find_map(|line| {
            let (_, address) = line.split_once("Running on ")?;
            Some(address.split_whitespace().next()?.to_owned())
        });
        // Whoever does not read what it says would stop it.
        std::thread::spawn(move || lines.for_each(drop));
        match address {
            Some(address) => Ok(Self { child, address }),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                Err("moto_server ended without saying where it listens".into())
            }
        }
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn conforms_over_s3_with_credentials_from_the_environment() {
    let moto = match Moto::start() {
        Ok(moto) => moto,
        Err(reason) => {
            println!("SKIP {reason}");
            return;
        }
    };
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "moto::child_of_the_test_above", "--ignored", "--nocapture"])
        .env(ADDRESS, &moto.address)
        .envs([
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT", moto.address.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
        ])
        .status();
    assert!(status.unwrap().success());
}

#[test]
#[ignore = "run by the test above, in a process with credentials in its environment"]
fn child_of_the_test_above() {
    let Ok(address) = std::env::var(ADDRESS) else {
        println!("SKIP only the test above gives it an address");
        return;
    };
    // Buckets are made by their owners; this one is ours. A signature is not asked for here.
    let host = address.trim_start_matches("http://");
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    let request = format!(
        "PUT /bucket HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    let next = AtomicU64::new(0);
    conformance(Keeps::Everything, || {
        let prefix = next.fetch_add(1, Ordering::Relaxed);
        let config = ObjectConfig::new(format!("s3://bucket/case/{prefix}"), "ns");
        Arc::new(ObjectBackend::open(config).unwrap())
    });
    let config = ObjectConfig::new("s3://bucket/parts", "ns").part_bytes(0);
    let backend = ObjectBackend::open(config).unwrap();
    assert_eq!(backend.capabilities().mode, "object: AmazonS3(bucket)");
    for len in [(5 << 20) + 1, 11 << 20] {
        assert_eq!(dump(&backend, 3, len), Ok(()));
        assert_eq!(load(&backend, 3, len), Ok(()));
    }
    assert_eq!(dump(&backend, 3, 11 << 20), Ok(()));
    assert_eq!(backend.report().deduplicated, 1);
    assert_eq!((dump(&backend, 4, LEN), dump(&backend, 4, LEN)), (Ok(()), Ok(())));
    assert_eq!(backend.report().deduplicated, 2);
    let without = ObjectConfig::new("s3://nobodys-bucket/x", "ns");
    assert_eq!(ObjectBackend::open(without).unwrap_err().kind(), ErrorKind::Io);
}
