//! Garbage on the channel: the hand closes it and ends; it neither panics nor hangs.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test: it starts the hand, and panics when something is off"
)]

mod kit;

use std::io::{Read, Write};
use std::time::Duration;

use kit::{ends_within, start};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use prost::Message;
use proto::hand::exec_input::Input;
use proto::hand::{BootConfig, ExecInput, Start};

/// What an HTTP/2 client says first: the preface, and empty SETTINGS.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), body].concat()
}

/// A literal header field without indexing, both strings plain.
fn header(name: &str, value: &str) -> Vec<u8> {
    let string = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [vec![0], string(name), string(value)].concat()
}

/// An exec as it looks on the wire.
fn call(stream: u32, message: &[u8]) -> Vec<u8> {
    let headers = [
        header(":method", "POST"),
        header(":scheme", "http"),
        header(":path", "/tendon.hand.v1.Hand/Exec"),
        header(":authority", "hand"),
        header("content-type", "application/grpc"),
        header("te", "trailers"),
    ]
    .concat();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[0], &length[..], message].concat();
    [frame(1, 4, stream, &headers), frame(0, 1, stream, &body)].concat()
}

fn exec_true(stream: u32) -> Vec<u8> {
    let start = Start { exec: format!("ex-{stream}"), argv: vec!["true".into()], ..Start::default() };
    call(stream, &ExecInput { input: Some(Input::Start(start)) }.encode_to_vec())
}

/// Sends, says that nothing follows, reads what comes, and has the hand end well.
#[track_caller]
fn hand_survives(bytes: &[u8]) -> Vec<u8> {
    let (mut child, mut channel) = start(&BootConfig::new("/tmp").to_json().unwrap());
    channel.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // The hand may close while we still write.
    let _ = channel.write_all(bytes);
    channel.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count) = channel.read(&mut buffer) {
        if count == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..count]);
    }
    drop(channel);
    let ended = ends_within(&mut child, Duration::from_secs(10));
    if !ended {
        child.kill().unwrap();
    }
    let status = child.wait().unwrap();
    assert!(ended && status.success(), "{status:?} after {bytes:02x?}");
    answer
}

/// Whether a DATA frame and then HEADERS that end the stream came for stream 1.
fn ended_with_trailers(mut answer: &[u8]) -> bool {
    let mut data = false;
    while let Some((head, rest)) = answer.split_at_checked(9) {
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        data |= head[3] == 0 && length > 0;
        if data && head[3] == 1 && head[4] & 1 == 1 && head[8] == 1 {
            return true;
        }
        answer = rest.get(length..).unwrap_or_default();
    }
    false
}

#[test]
fn a_hand_made_call_is_answered() {
    let (mut child, mut channel) = start(&BootConfig::new("/tmp").to_json().unwrap());
    channel.write_all(&[HELLO, &exec_true(1)].concat()).unwrap();
    channel.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    // So that the cases below, which are mutations of this one, reach deep.
    while !ended_with_trailers(&answer) {
        let count = channel.read(&mut buffer).unwrap();
        assert!(count > 0, "closed without an answer: {answer:02x?}");
        answer.extend_from_slice(&buffer[..count]);
    }
    drop(channel);
    assert!(ends_within(&mut child, Duration::from_secs(5)));
}

#[test]
fn well_known_nonsense() {
    hand_survives(b"");
    hand_survives(b"GET / HTTP/1.1\r\n\r\n");
    hand_survives(&HELLO[..10]);
    hand_survives(&[HELLO, &[0xff; 64]].concat());
    // A message that claims to be 4 GiB; one that is no message; one without a stream; data after the end.
    hand_survives(&[HELLO, &call(1, b""), &frame(0, 0, 1, &[0, 255, 255, 255, 255, 1])].concat());
    hand_survives(&[HELLO, &call(1, &[0xff; 100])].concat());
    hand_survives(&[HELLO, &frame(0, 0, 7, b"x")].concat());
    hand_survives(&[HELLO, &exec_true(1), &exec_true(1)].concat());
    // 2,000 pings, 2,000 resets.
    hand_survives(&[HELLO, &frame(6, 0, 0, &[0; 8]).repeat(2000)].concat());
    let resets: Vec<u8> = (0..2000)
        .flat_map(|n| [exec_true(2 * n + 1), frame(3, 0, 2 * n + 1, &[0, 0, 0, 8])].concat())
        .collect();
    hand_survives(&[HELLO, &resets].concat());
}

#[test]
fn random_bytes_and_mutated_calls() {
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let mutation = (any::<prop::sample::Index>(), any::<u8>());
    let noise =
        (any::<bool>(), prop::collection::vec(any::<u8>(), 0..600), prop::collection::vec(mutation, 0..12));
    TestRunner::new(config)
        .run(&noise, |(raw, bytes, mutations)| {
            let mut sent = [HELLO, &exec_true(1), &exec_true(3), &call(5, &bytes)].concat();
            for (index, value) in mutations {
                // The preface stays: without it nothing else is looked at.
                let at = 24 + index.index(sent.len() - 24);
                sent[at] = value;
            }
            hand_survives(if raw { &bytes } else { &sent });
            Ok(())
        })
        .unwrap();
}

#[test]
fn decoders_take_anything() {
    let config = Config { cases: 2000, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&prop::collection::vec(any::<u8>(), 0..300), |bytes| {
            let _ = proto::hand::decode_exec_output(&bytes);
            let _ = BootConfig::from_json(&bytes);
            if let Ok(ExecInput { input: Some(Input::Start(start)) }) = proto::hand::decode_exec_input(&bytes)
            {
                let _ = hand::plan::check(start);
            }
            Ok(())
        })
        .unwrap();
}
