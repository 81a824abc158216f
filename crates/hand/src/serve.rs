//! The service: answers the runner's calls over the one channel, until that closes.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper_util::rt::{TokioExecutor, TokioIo};
use proto::hand::control_request::Action;
use proto::hand::exec_input::Input;
use proto::hand::exec_output::Output;
use proto::hand::exited::How;
use proto::hand::hand_server::{Hand, HandServer};
use proto::hand::put_input::Input as PutMessage;
use proto::hand::{
    BootConfig, ControlReply, ControlRequest, ExecInput, ExecOutput, Exited, GetChunk, GetRequest,
    KillAllReply, KillAllRequest, MESSAGE_BYTES_MAX, PutInput, PutReply, SelfTestReply, SelfTestRequest,
    StatusReply, StatusRequest,
};
use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::{Request, Response, Status, Streaming};

use crate::files::{FileError, Incoming, Outgoing};
use crate::limits;
use crate::plan;
use crate::table::{Cause, Table};
use crate::{exec, selftest};

/// A hand: the state behind the service.
#[derive(Debug)]
pub struct Server {
    /// What runs.
    pub table: Arc<Table>,
    /// What it was told at boot.
    pub config: BootConfig,
    /// The branch's root.
    pub root: OwnedFd,
    /// `/dev/null`, for commands without stdin.
    pub null: OwnedFd,
    /// What came of Landlock.
    pub landlock: String,
    /// Names temporary files.
    pub serial: AtomicU64,
}

/// Serves until the channel closes, for whatever reason, or breaks the protocol.
pub async fn serve(server: Server, channel: UnixStream) {
    let hand = HandServer::new(server).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let service = hyper::service::service_fn(move |request| {
        let mut hand = hand.clone();
        async move { Ok::<_, Infallible>(hand.call(request).await.unwrap_or_else(|never| match never {})) }
    });
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .auto_date_header(false)
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        // Each call has its own window; a shared one would let calls that wait stop all others.
        .initial_connection_window_size((1 << 31) - 1)
        .max_frame_size(limits::FRAME_BYTES_MAX)
        .max_header_list_size(limits::HEADER_BYTES_MAX)
        .max_send_buf_size(limits::SEND_BUFFER_BYTES)
        .max_concurrent_streams(limits::CALLS_MAX)
        // The runner may cancel many calls at once: that is no attack.
        .max_pending_accept_reset_streams(limits::CALLS_MAX as usize);
    // However it ends: without the runner there is nothing to do.
    let _ = builder.serve_connection(TokioIo::new(channel), service).await;
}

fn refused(error: &FileError) -> Status {
    let mut text = error.to_string();
    if let FileError::Io { source, .. } = error {
        text = format!("{text}: {source}");
    }
    match error {
        FileError::Path { .. } | FileError::NotRegular { .. } => Status::invalid_argument(text),
        FileError::TooLarge { .. } => Status::out_of_range(text),
        FileError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Status::not_found(text)
        }
        FileError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            Status::resource_exhausted(text)
        }
        FileError::Io { .. } => Status::failed_precondition(text),
    }
}

fn not_started(failure: exec::Failure) -> ExecOutput {
    let exec::Failure { reason, processes_full, program_missing } = failure;
    let how = Some(How::NotStarted(reason));
    let exited = Exited { how, processes_full, program_missing, ..Exited::default() };
    ExecOutput { output: Some(Output::Exited(exited)) }
}

#[tonic::async_trait]
impl Hand for Server {
    type ExecStream = ReceiverStream<Result<ExecOutput, Status>>;
    type GetStream = ReceiverStream<Result<GetChunk, Status>>;

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut input = request.into_inner();
        let Some(ExecInput { input: Some(Input::Start(start)) }) = input.message().await? else {
            return Err(Status::invalid_argument("an exec begins with `start`"));
        };
        if self.table.is_running(&start.exec) {
            return Err(Status::already_exists("an exec of this id runs"));
        }
        let (out, stream) = mpsc::channel(2);
        let started = plan::check(start)
            .map_err(exec::Failure::from)
            .and_then(|plan| exec::start(&self.table, &plan, input, &self.null, out.clone()));
        if let Err(failure) = started {
            // The channel is new: there is room.
            let _ = out.try_send(Ok(not_started(failure)));
        }
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn control(&self, request: Request<ControlRequest>) -> Result<Response<ControlReply>, Status> {
        let ControlRequest { exec, action } = request.into_inner();
        let found = match action {
            Some(Action::Signal(number)) => {
                let signal = Signal::from_named_raw(number)
                    .ok_or_else(|| Status::invalid_argument(format!("{number} is not a signal")))?;
                self.table.signal(&exec, signal)
            }
            Some(Action::Resize(size)) => match self.table.terminal(&exec) {
                Some(terminal) => rustix::termios::tcsetwinsize(&*terminal, exec::winsize(size)).is_ok(),
                None => false,
            },
            Some(Action::Cancel(_)) => self.table.stop(&exec, Cause::Cancelled),
            None => return Err(Status::invalid_argument("no action")),
        };
        Ok(Response::new(ControlReply { found }))
    }

    async fn put(&self, request: Request<Streaming<PutInput>>) -> Result<Response<PutReply>, Status> {
        let mut input = request.into_inner();
        let Some(PutInput { input: Some(PutMessage::Open(open)) }) = input.message().await? else {
            return Err(Status::invalid_argument("a put begins with `open`"));
        };
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let mut file =
            Incoming::open(&self.root, &open, self.config.file_bytes_max, serial).map_err(|e| refused(&e))?;
        while let Some(message) = input.message().await? {
            let Some(PutMessage::Chunk(chunk)) = message.input else {
                return Err(Status::invalid_argument("after `open` comes content"));
            };
            file.write(&chunk).map_err(|e| refused(&e))?;
        }
        let bytes = file.finish().map_err(|e| refused(&e))?;
        Ok(Response::new(PutReply { bytes }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let request = request.into_inner();
        let mut file =
            Outgoing::open(&self.root, &request, self.config.file_bytes_max).map_err(|e| refused(&e))?;
        let (out, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Ok(room) = out.reserve().await {
                match file.next_chunk() {
                    Some(Ok(chunk)) => room.send(Ok(chunk)),
                    Some(Err(error)) => {
                        room.send(Err(Status::data_loss(format!("the file can't be read: {error}"))))
                    }
                    None => break,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn self_test(&self, _: Request<SelfTestRequest>) -> Result<Response<SelfTestReply>, Status> {
        let findings = selftest::run(&self.config, &self.landlock, &self.table);
        Ok(Response::new(SelfTestReply { findings }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Ok(Response::new(self.table.status()))
    }

    async fn kill_all(&self, _: Request<KillAllRequest>) -> Result<Response<KillAllReply>, Status> {
        let execs = self.table.kill_everything(&Cause::Cancelled);
        self.table.until_empty().await;
        Ok(Response::new(KillAllReply { execs: u32::try_from(execs).unwrap_or(u32::MAX) }))
    }
}
