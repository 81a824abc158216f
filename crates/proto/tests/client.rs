//! The client against a runner that answers with fixed bytes: good ones, broken ones, and ones without end.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::path::PathBuf;

use proto::client::{Client, ClientError};
use proto::error::{Code, Coded as _};
use proto::http::{ExecInput, ExecLine};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

/// A socket that answers its first connection with `answer` and then closes it; returns what it was sent.
fn serve(answer: Vec<u8>) -> (tempfile::TempDir, Client, tokio::task::JoinHandle<Vec<u8>>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    let task = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let read = stream.read(&mut request).await.unwrap();
        request.truncate(read);
        // The client may have seen enough before the end.
        let _ = stream.write_all(&answer).await;
        request
    });
    (dir, Client::new(path), task)
}

fn answer(status: &str, body: &[u8]) -> Vec<u8> {
    let mut out = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
    out.extend_from_slice(body);
    out
}

fn chunked(body: &[u8]) -> Vec<u8> {
    let mut out =
        format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len()).into_bytes();
    out.extend_from_slice(body);
    out.extend_from_slice(b"\r\n");
    out
}

#[tokio::test]
async fn an_answer_and_an_error_of_the_runner() {
    let (_dir, client, request) = serve(answer("200 OK", b"{\"a\":1}"));
    assert_eq!(client.post::<Value>("/v1/x", &1).await.unwrap()["a"], 1);
    let request = String::from_utf8(request.await.unwrap()).unwrap();
    assert!(request.starts_with("POST /v1/x HTTP/1.1\r\n") && request.ends_with("\r\n\r\n1"), "{request}");

    let body = br#"{"code":"not_found","message":"no branch `x`","causes":["why"],"hint":"look"}"#;
    let (_dir, client, _) = serve(answer("404 Not Found", body));
    let error = client.get::<Value>("/v1/x").await.unwrap_err();
    assert_eq!((error.code(), error.to_string()), (Code::NotFound, "no branch `x`".into()));
    assert_eq!(error.into_body().causes, ["why"]);
}

#[tokio::test]
async fn events_come_one_by_one_also_when_cut_in_odd_places() {
    let (_dir, client, _) = serve(chunked(
        b"{\"event\":\"output\",\"fd\":1,\"bytes\":\"a\\nb\"}\n{\"event\":\"output\",\"fd\":2,\"bytes\":{\"base64\":\"/w==\"}}\n",
    ));
    let mut events = client.events::<ExecLine>("/v1/x", &1).await.unwrap();
    let mut seen = Vec::new();
    while let Ok(ExecLine::Output { fd, bytes }) = events.next().await {
        seen.push((fd, bytes.decode().unwrap()));
    }
    assert_eq!(seen, [(1, b"a\nb".to_vec()), (2, vec![0xff])]);
}

#[tokio::test]
async fn a_broken_stream_is_an_error_not_an_end() {
    let (_dir, client, _) = serve(chunked(b"{\"event\":\"outp"));
    let mut events = client.events::<ExecLine>("/v1/x", &1).await.unwrap();
    assert!(matches!(events.next().await, Err(ClientError::Died { .. })));
    let (_dir, client, _) = serve(chunked(b"nonsense\n"));
    let mut events = client.events::<ExecLine>("/v1/x", &1).await.unwrap();
    assert!(matches!(events.next().await, Err(ClientError::Answer(_))));
}

#[tokio::test]
async fn a_runner_that_died_and_one_that_broke_off_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    let socket = dir.path().join("run/tendond.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let log = dir.path().join("logs/tendond.log").display().to_string();
    let call = async || {
        let client = Client::new(&socket);
        let (answer, ()) = tokio::join!(client.get::<Value>("/v1/x"), async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{").await.unwrap();
        });
        answer.unwrap_err().into_body()
    };
    let lives = call().await;
    assert_eq!((lives.code, &*lives.message), (Code::HostBroken, "the runner broke off its answer"));
    // The connection by which the client found out.
    drop(listener.accept().await.unwrap());
    let client = Client::new(&socket);
    let (answer, ()) = tokio::join!(client.get::<Value>("/v1/x"), async {
        let (stream, _) = listener.accept().await.unwrap();
        drop((stream, listener));
    });
    let died = answer.unwrap_err().into_body();
    assert_eq!((died.code, &*died.message), (Code::HostBroken, "the runner ended in the middle of its work"));
    for body in [lives, died] {
        assert_eq!(body.causes, <[&str; 0]>::default());
        assert!(body.hint.unwrap().contains(&log));
    }
}

#[tokio::test]
async fn a_line_without_end_is_given_up() {
    let (_dir, client, _) = serve(chunked(&vec![b'x'; proto::http::LINE_BYTES_MAX + 4096]));
    let mut events = client.events::<ExecLine>("/v1/x", &1).await.unwrap();
    let error = events.next().await.unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
}

#[tokio::test]
async fn no_runner_and_nonsense_are_told_apart() {
    let missing = Client::new(PathBuf::from("/nonexistent/sock"));
    assert!(matches!(missing.get::<Value>("/").await, Err(ClientError::NoRunner(_))));
    let (_dir, client, _) = serve(b"SSH-2.0-x\r\n".to_vec());
    assert!(matches!(client.get::<Value>("/").await, Err(ClientError::Died { .. })));
    let (_dir, client, _) = serve(answer("500 Oops", b"<html>"));
    assert!(matches!(client.get::<Value>("/").await, Err(ClientError::Answer(_))));
}

#[tokio::test]
async fn a_socket_deep_in_the_tree_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
    std::fs::create_dir_all(&deep).unwrap();
    let socket = deep.join("tendond.sock");
    let (path, _held) = proto::client::reachable(&socket);
    let listener = UnixListener::bind(path).unwrap();
    assert!(socket.exists());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 1024]).await;
        stream.write_all(&answer("200 OK", b"1")).await.unwrap();
    });
    assert_eq!(Client::new(socket).get::<Value>("/").await.unwrap(), 1);
}

#[tokio::test]
async fn input_goes_on_while_events_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("stdin") {
            stream.read_buf(&mut seen).await.unwrap();
        }
        stream.write_all(b"26\r\n{\"event\":\"output\",\"fd\":1,\"bytes\":\"x\"}\n\r\n").await.unwrap();
        // Until the client ends its body.
        while !String::from_utf8_lossy(&seen).ends_with("0\r\n\r\n") {
            stream.read_buf(&mut seen).await.unwrap();
        }
    });
    let (sender, mut events) =
        Client::new(path).duplex::<ExecInput, ExecLine>("/v1/x", &"first").await.unwrap();
    sender.send(&ExecInput { stdin: proto::path::JsonBytes::new(b"in") }).await.unwrap();
    assert!(matches!(events.next().await.unwrap(), ExecLine::Output { .. }));
    drop(sender);
    server.await.unwrap();
}
