package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A stream is the files of a directory. All integers are little-endian.
//
//	magic     8 bytes
//	uint32    length of the header
//	uint64    sum of the files' sizes
//	header    for each file, in ascending order of names:
//	          uint16 length of the name, name, uint64 size
//	checksum
//	for each file: contents, checksum
//
// A checksum is the CRC-32C, as uint32, of all before it but the other checksums. A directory has
// one stream, and a stream one directory.
const (
	magic        = "codeqSS1"
	prefixSize   = len(magic) + 4 + 8
	checksumSize = 4
	// maxHeader limits the memory of a receiver: half a million files.
	maxHeader = 16 << 20
	maxName   = 255
	maxPiece  = 64 << 10 // written to a file at once
)

// file is one line of the header.
type file struct {
	name string
	size int64
}

// packer reads a directory as a stream, a piece at a time.
type packer struct {
	fs    vfs.FS
	dir   string
	files []file   // yet to be sent, including the one being sent
	open  vfs.File // the one being sent; nil between files
	left  int64    // bytes of it yet to be sent
	small []byte   // bytes that go first: header or checksum
	sum   uint32
}

// newPacker returns the stream of dir, and its exact size. Nothing may change dir.
func newPacker(fs vfs.FS, dir string) (*packer, int64, error) {
	names, err := fs.List(dir)
	if err != nil {
		return nil, 0, err
	}
	slices.Sort(names)
	p := &packer{fs: fs, dir: dir}
	for _, name := range names {
		info, err := fs.Stat(fs.PathJoin(dir, name))
		if err != nil {
			return nil, 0, err
		}
		if info.IsDir() || !validName(name) {
			return nil, 0, fmt.Errorf("unexpected file %q", name)
		}
		p.files = append(p.files, file{name, info.Size()})
	}
	if len(p.files) == 0 {
		return nil, 0, errors.New("no files")
	}
	header, total := appendHeader(nil, p.files)
	if len(header)-prefixSize > maxHeader {
		return nil, 0, fmt.Errorf("%d files are too many", len(p.files))
	}
	p.sum = crc32.Checksum(header, castagnoli)
	p.small = binary.LittleEndian.AppendUint32(header, p.sum)
	return p, int64(len(p.small)) + total + checksumSize*int64(len(p.files)), nil
}

func (p *packer) Read(b []byte) (int, error) {
	for len(b) > 0 {
		switch {
		case len(p.small) > 0:
			n := copy(b, p.small)
			p.small = p.small[n:]
			return n, nil
		case p.open == nil && len(p.files) == 0:
			return 0, io.EOF
		case p.open == nil:
			f, err := p.fs.Open(p.fs.PathJoin(p.dir, p.files[0].name))
			if err != nil {
				return 0, err
			}
			p.open, p.left = f, p.files[0].size
		case p.left == 0:
			if err := p.close(); err != nil {
				return 0, err
			}
			p.files = p.files[1:]
			p.small = binary.LittleEndian.AppendUint32(nil, p.sum)
		default:
			n, err := p.open.Read(b[:min(int64(len(b)), p.left)])
			p.sum = crc32.Update(p.sum, castagnoli, b[:n])
			p.left -= int64(n)
			if n > 0 {
				return n, nil
			}
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			if err != nil {
				return 0, fmt.Errorf("read %s: %w", p.files[0].name, err)
			}
		}
	}
	return 0, nil
}

// close closes the file being sent.
func (p *packer) close() error {
	if p.open == nil {
		return nil
	}
	err := p.open.Close()
	p.open = nil
	return err
}

// unpacker writes the files of a stream, as it arrives, into a directory.
type unpacker struct {
	fs  vfs.FS
	dir string // a new directory

	stage stage
	small []byte   // what has arrived of a prefix, header or checksum
	total int64    // sum of the files' sizes, as the prefix says
	want  int      // length of header and its checksum
	files []file   // yet to be received, including the one being received
	open  vfs.File // the one being received, while in stageContents
	left  int64    // bytes of it yet to be received
	piece []byte   // copy for File.Write, which may change what it is given
	sum   uint32
	err   error // why the stream is refused
}

// stage is what the next byte belongs to.
type stage int

const (
	stagePrefix stage = iota
	stageHeader
	stageContents
	stageChecksum
	stageEnd
)

func newUnpacker(fs vfs.FS, dir string) *unpacker {
	return &unpacker{fs: fs, dir: dir, want: prefixSize}
}

func (u *unpacker) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) && u.err == nil {
		var n int
		n, u.err = u.take(p[done:])
		done += n
	}
	return done, u.err
}

// take takes some of p, which is not empty.
func (u *unpacker) take(p []byte) (int, error) {
	switch u.stage {
	case stageEnd:
		return 0, fmt.Errorf("%w: bytes after the end of the stream", ErrDamaged)
	case stageContents:
		p = p[:min(int64(len(p)), u.left, maxPiece)]
		u.sum = crc32.Update(u.sum, castagnoli, p)
		u.piece = append(u.piece[:0], p...)
		n, err := u.open.Write(u.piece)
		if err != nil {
			return n, err
		}
		u.left -= int64(n)
		return n, u.endFile()
	}
	p = p[:min(len(p), u.want-len(u.small))]
	u.small = append(u.small, p...)
	if len(u.small) < u.want {
		return len(p), nil
	}
	small := u.small
	u.small = nil
	switch u.stage {
	case stagePrefix:
		return len(p), u.prefix(small)
	case stageHeader:
		return len(p), u.header(small)
	default:
		if err := u.check(small); err != nil {
			return len(p), err
		}
		u.files = u.files[1:]
		return len(p), u.beginFile()
	}
}

func (u *unpacker) prefix(b []byte) error {
	if string(b[:len(magic)]) != magic {
		return fmt.Errorf("%w: not a stream of this format: %q", ErrDamaged, b[:len(magic)])
	}
	header := binary.LittleEndian.Uint32(b[len(magic):])
	total := binary.LittleEndian.Uint64(b[len(magic)+4:])
	if header > maxHeader || total > math.MaxInt64 {
		return fmt.Errorf("%w: header of %d bytes, contents of %d", ErrDamaged, header, total)
	}
	u.sum = crc32.Checksum(b, castagnoli)
	u.total = int64(total)
	u.want = int(header) + checksumSize
	u.stage = stageHeader
	return nil
}

func (u *unpacker) header(b []byte) error {
	header, sum := b[:len(b)-checksumSize], b[len(b)-checksumSize:]
	u.sum = crc32.Update(u.sum, castagnoli, header)
	if err := u.check(sum); err != nil {
		return err
	}
	files, err := parseHeader(header, u.total)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	u.files = files
	u.want = checksumSize
	return u.beginFile()
}

func (u *unpacker) check(b []byte) error {
	if got := binary.LittleEndian.Uint32(b); got != u.sum {
		return fmt.Errorf("%w: checksum %08x, not %08x", ErrDamaged, u.sum, got)
	}
	return nil
}

func (u *unpacker) beginFile() error {
	if len(u.files) == 0 {
		u.stage = stageEnd
		return nil
	}
	f, err := u.fs.Create(u.fs.PathJoin(u.dir, u.files[0].name), vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	u.open, u.left = f, u.files[0].size
	u.stage = stageContents
	return u.endFile()
}

// endFile makes the file durable, if all of it has arrived.
func (u *unpacker) endFile() error {
	if u.left > 0 {
		return nil
	}
	err := errors.Join(u.open.Sync(), u.open.Close())
	u.open = nil
	u.stage = stageChecksum
	return err
}

// finish makes the directory durable, if all of the stream has arrived.
func (u *unpacker) finish() error {
	u.abandon()
	if u.err != nil {
		return u.err
	}
	if u.stage != stageEnd {
		return fmt.Errorf("%w: %w", ErrDamaged, io.ErrUnexpectedEOF)
	}
	return syncDir(u.fs, u.dir)
}

// abandon closes the file being received. The directory is the caller's.
func (u *unpacker) abandon() {
	if u.open != nil {
		_ = u.open.Close()
		u.open = nil
	}
}

// appendHeader appends prefix and header, and returns the sum of the sizes.
func appendHeader(b []byte, files []file) ([]byte, int64) {
	var total int64
	var header []byte
	for _, f := range files {
		total += f.size
		header = binary.LittleEndian.AppendUint16(header, uint16(len(f.name)))
		header = append(header, f.name...)
		header = binary.LittleEndian.AppendUint64(header, uint64(f.size))
	}
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(header)))
	b = binary.LittleEndian.AppendUint64(b, uint64(total))
	return append(b, header...), total
}

func parseHeader(b []byte, total int64) ([]file, error) {
	var files []file
	left := total
	for len(b) > 0 {
		if len(b) < 2 {
			return nil, io.ErrUnexpectedEOF
		}
		length := int(binary.LittleEndian.Uint16(b))
		b = b[2:]
		if len(b) < length+8 {
			return nil, io.ErrUnexpectedEOF
		}
		name := string(b[:length])
		size := binary.LittleEndian.Uint64(b[length:])
		b = b[length+8:]
		if !validName(name) {
			return nil, fmt.Errorf("invalid file name %q", name)
		}
		if len(files) > 0 && name <= files[len(files)-1].name {
			return nil, fmt.Errorf("file %q is out of order", name)
		}
		if size > uint64(left) {
			return nil, fmt.Errorf("file %q of %d bytes, %d are left", name, size, left)
		}
		left -= int64(size)
		files = append(files, file{name, int64(size)})
	}
	if len(files) == 0 || left != 0 {
		return nil, fmt.Errorf("%d files with %d bytes too little", len(files), left)
	}
	return files, nil
}

// validName reports whether name is a plain file name on every system. Pebble uses no others.
func validName(name string) bool {
	if name == "" || len(name) > maxName || name[0] == '.' {
		return false
	}
	const allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
	return strings.Trim(name, allowed) == ""
}
