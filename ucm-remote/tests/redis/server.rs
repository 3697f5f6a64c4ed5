//! Real servers, started and killed by the tests.

use std::{
    io,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const WATCHDOG: Duration = Duration::from_secs(60);

/// A server process; killed on drop.
pub(crate) struct Server {
    program: &'static str,
    process: Child,
    folder: tempfile::TempDir,
    pub(crate) port: u16,
    cluster: bool,
}

/// The server program, or the reason why there is none.
pub(crate) fn program() -> Result<&'static str, &'static str> {
    let runs = |program: &&&str| {
        let output = Command::new(program).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let found = ["redis-server", "valkey-server"].iter().find(runs);
    found
        .copied()
        .ok_or("no redis-server or valkey-server on PATH; install the package redis-server")
}

fn free_port() -> u16 {
    // A cluster also listens on port + 10,000.
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        if port < 55_000 && TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            return port;
        }
    }
}

impl Server {
    pub(crate) fn start(program: &'static str, cluster: bool) -> Self {
        let mut folder = tempfile::tempdir().unwrap();
        for _ in 0..20 {
            let port = free_port();
            let process = Self::spawn(program, port, folder.path(), cluster);
            let mut server = Self { program, process, folder, port, cluster };
            if server.answers() {
                return server;
            }
            // Somebody else took the port.
            folder = server.take_folder();
        }
        panic!("no port for {program}");
    }

    fn spawn(program: &str, port: u16, folder: &Path, cluster: bool) -> Child {
        let mut command = Command::new(program);
        command.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"]);
        command.arg(port.to_string()).arg("--dir").arg(folder);
        if cluster {
            command.args(["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn take_folder(mut self) -> tempfile::TempDir {
        std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap())
    }

    /// False when the process has ended instead.
    fn answers(&mut self) -> bool {
        let begun = Instant::now();
        while self.process.try_wait().unwrap().is_none() {
            if self.ask(&["PING"]).is_ok_and(|answer| answer.contains("PONG")) {
                return true;
            }
            assert!(begun.elapsed() < WATCHDOG, "{} does not answer", self.program);
            thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// One command, by the plain protocol; the beginning of the answer.
    pub(crate) fn ask(&self, words: &[&str]) -> io::Result<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(WATCHDOG))?;
        let mut text = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| text += &format!("${}\r\n{word}\r\n", word.len()));
        stream.write_all(text.as_bytes())?;
        let mut answer = [0; 4096];
        let len = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..len]).into_owned())
    }

    pub(crate) fn address(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Empty, at the same port.
    pub(crate) fn restart(&mut self) {
        self.process = Self::spawn(self.program, self.port, self.folder.path(), self.cluster);
        assert!(self.answers(), "the port was taken");
    }

    /// SIGSTOP or SIGCONT.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Three masters that share the slots.
pub(crate) fn cluster(program: &'static str) -> Vec<Server> {
    let servers: Vec<Server> = (0..3).map(|_| Server::start(program, true)).collect();
    let slots = ["0 5460", "5461 10922", "10923 16383"];
    for (index, (server, slots)) in servers.iter().zip(slots).enumerate() {
        let (first, last) = slots.split_once(' ').unwrap();
        server.ask(&["CLUSTER", "ADDSLOTSRANGE", first, last]).unwrap();
        server.ask(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]).unwrap();
        server.ask(&["CLUSTER", "MEET", "127.0.0.1", &servers[0].port.to_string()]).unwrap();
    }
    let begun = Instant::now();
    let good = |server: &Server| {
        let info = server.ask(&["CLUSTER", "INFO"]).unwrap();
        info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
    };
    while !servers.iter().all(good) {
        assert!(begun.elapsed() < WATCHDOG, "the cluster does not form");
        thread::sleep(Duration::from_millis(20));
    }
    servers
}
