//! A service that speaks as much of S3 as is needed, and says something else on demand.
//!
//! **Invariant:** what is not twisted is answered truly.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, mpsc},
};

use ucm_store::ObjectConfig;

/// What a GET of a range gets instead.
#[derive(Clone, Copy, Debug)]
pub(super) enum Twist {
    /// A body of so many bytes, of unknown length.
    Chunked(usize),
    /// A body of so many bytes whose length is told.
    Length(usize),
    /// A body of so many bytes, although the right length was told.
    Unsaid(usize),
    /// This status.
    Status(u16),
    /// Nothing, ever.
    Hang,
}

pub(super) struct Server {
    address: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    objects: HashMap<String, Vec<u8>>,
    twist: Option<(Twist, u32)>,
    requests: usize,
    hung: Vec<TcpStream>,
    tell: Option<mpsc::Sender<()>>,
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

impl Server {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shared) = (stream.unwrap(), Arc::clone(&shared));
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { address, state }
    }

    /// Tries once more, with credentials that nobody checks.
    pub(super) fn config(&self) -> ObjectConfig {
        ObjectConfig::new("s3://bucket/some/where", "ns")
            .option("aws_endpoint", format!("http://{}", self.address))
            .option("aws_region", "nowhere")
            .option("aws_allow_http", "true")
            .option("aws_skip_signature", "true")
            .retries(1)
    }

    pub(super) fn twist(&self, twist: Twist, times: u32) {
        self.state.lock().unwrap().twist = Some((twist, times));
    }

    pub(super) fn clear(&self) {
        let mut state = self.state.lock().unwrap();
        state.twist = None;
        state.hung.clear();
    }

    /// Hangs from now on; each such request is told.
    pub(super) fn hang_and_wait(&self) -> mpsc::Receiver<()> {
        let (tell, told) = mpsc::channel();
        let mut state = self.state.lock().unwrap();
        state.twist = Some((Twist::Hang, u32::MAX));
        state.tell = Some(tell);
        told
    }

    pub(super) fn requests(&self) -> usize {
        self.state.lock().unwrap().requests
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<State>) {
    let Some(request) = read(&stream) else { return };
    let mut state = state.lock().unwrap();
    state.requests += 1;
    let is_read = request.method == "GET" || request.method == "HEAD";
    let twist = match &mut state.twist {
        Some((twist, left)) if *left > 0 && (is_read || matches!(twist, Twist::Hang)) => {
            *left -= u32::from(*left < u32::MAX);
            Some(*twist)
        }
        _ => None,
    };
    let answer = match twist {
        Some(Twist::Hang) => {
            state.hung.push(stream);
            if let Some(tell) = &state.tell {
                let _ = tell.send(());
            }
            return;
        }
        Some(Twist::Status(status)) => head(status, "content-length: 0"),
        twist => truth(&mut state, &request, twist),
    };
    drop(state);
    let _ = stream.write_all(&answer);
}

fn truth(state: &mut State, request: &Request, twist: Option<Twist>) -> Vec<u8> {
    let exists = state.objects.contains_key(&request.path);
    match request.method.as_str() {
        "PUT" if exists && request.headers.contains_key("if-none-match") => {
            head(412, "content-length: 0")
        }
        "PUT" => {
            state.objects.insert(request.path.clone(), request.body.clone());
            head(200, "etag: \"1\"\r\ncontent-length: 0")
        }
        "DELETE" => {
            state.objects.remove(&request.path);
            head(204, "content-length: 0")
        }
        "POST" => delete_many(state, &request.body),
        _ => match state.objects.get(&request.path) {
            None => head(404, "content-length: 0"),
            Some(object) => read_object(object, request, twist),
        },
    }
}

/// `DeleteObjects`: the keys stand between tags.
fn delete_many(state: &mut State, body: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(body).into_owned();
    let mut deleted = String::new();
    for key in text.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next()) {
        state.objects.remove(&format!("/bucket/{key}"));
        deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
    }
    let body = format!("<?xml version=\"1.0\"?><DeleteResult>{deleted}</DeleteResult>");
    let mut answer = head(200, &format!("content-length: {}", body.len()));
    answer.extend_from_slice(body.as_bytes());
    answer
}

fn read_object(object: &[u8], request: &Request, twist: Option<Twist>) -> Vec<u8> {
    let common = "etag: \"1\"\r\nlast-modified: Tue, 01 Dec 2026 00:00:00 GMT";
    if request.method == "HEAD" {
        return head(200, &format!("{common}\r\ncontent-length: {}", object.len()));
    }
    let range = request.headers.get("range").and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?))
    });
    let (from, to) = range.unwrap_or((0, object.len() - 1));
    let to = to.min(object.len() - 1);
    let span = format!("{common}\r\ncontent-range: bytes {from}-{to}/{}", object.len());
    let endless = object[from..=to].iter().chain(std::iter::repeat(&0x5A));
    let bytes = |len: usize| endless.clone().take(len).copied().collect::<Vec<u8>>();
    let (length, body) = match twist {
        Some(Twist::Chunked(len)) => {
            let mut body = Vec::new();
            for piece in bytes(len).chunks(1000) {
                body.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                body.extend_from_slice(piece);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(b"0\r\n\r\n");
            ("transfer-encoding: chunked".to_owned(), body)
        }
        Some(Twist::Length(len)) => (format!("content-length: {len}"), bytes(len)),
        Some(Twist::Unsaid(len)) => (format!("content-length: {}", to - from + 1), bytes(len)),
        _ => (format!("content-length: {}", to - from + 1), bytes(to - from + 1)),
    };
    let mut answer = head(206, &format!("{span}\r\n{length}"));
    answer.extend_from_slice(&body);
    answer
}

fn head(status: u16, headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} x\r\nconnection: close\r\n{headers}\r\n\r\n").into_bytes()
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let path = target.split('?').next()?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let len = headers.get("content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path, headers, body })
}
