//! Copying the content of one file to another as cheaply as the file system can: shared blocks, else what is not a hole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

const BUFFER_BYTES: usize = 1 << 20;

/// Makes the content of `target`, an empty file, the first `size` bytes of `source`.
pub fn copy(source: &File, target: &File, size: u64) -> io::Result<()> {
    if size == 0 || rustix::fs::ioctl_ficlone(target, source).is_ok() {
        return Ok(());
    }
    target.set_len(size)?;
    let mut at = 0;
    while at < size {
        let (data, hole) = next_data(source, at, size)?;
        copy_range(source, target, data, hole)?;
        at = hole;
    }
    Ok(())
}

/// The next range of data at or after `at`. A file system that can't tell has data everywhere.
pub fn next_data(file: &File, at: u64, size: u64) -> io::Result<(u64, u64)> {
    let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => data.clamp(at, size),
        Err(Errno::NXIO) => size,
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at, size)),
        Err(error) => return Err(error.into()),
    };
    if data == size {
        return Ok((size, size));
    }
    let hole = rustix::fs::seek(file, SeekFrom::Hole(data))?.clamp(data, size);
    Ok((data, hole))
}

fn copy_range(source: &File, target: &File, from: u64, to: u64) -> io::Result<()> {
    let (mut read_at, mut write_at) = (from, from);
    while read_at < to {
        let left = usize::try_from(to - read_at).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(source, Some(&mut read_at), target, Some(&mut write_at), left) {
            // It became shorter meanwhile.
            Ok(0) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {
                return read_write(source, target, read_at, to);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read_write(source: &File, target: &File, from: u64, to: u64) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = from;
    while at < to {
        let want = usize::try_from(to - at).unwrap_or(usize::MAX).min(buffer.len());
        let n = source.read_at(&mut buffer[..want], at)?;
        if n == 0 {
            break;
        }
        target.write_all_at(&buffer[..n], at)?;
        at += n as u64;
    }
    Ok(())
}
