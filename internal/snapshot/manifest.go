package snapshot

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A manifest lists the content of a checkpoint. All integers are little-endian.
//
//	magic     8 bytes
//	ID        16 bytes, random: no two checkpoints have the same
//	index     uint64, of the snapshot
//	term      uint64, of the snapshot
//	total     uint64, sum of the files' sizes
//	for each file, in ascending order of names:
//	          uint16 length of the name, name, uint64 size
//	checksum  CRC-32C, as uint32, of all before it
//
// A manifest has one encoding.
const (
	magic        = "codeqSM1"
	prefixSize   = len(magic) + 16 + 8 + 8 + 8
	checksumSize = 4
	// maxManifest limits the memory of a receiver: half a million files.
	maxManifest = 16 << 20
	maxName     = 255
)

type manifest struct {
	id          [16]byte
	index, term uint64
	files       []file
	total       int64
}

// file is one line of a manifest.
type file struct {
	name string
	size int64
}

// listFiles lists a directory that does not change.
func listFiles(fs vfs.FS, dir string) (files []file, total int64, err error) {
	names, err := fs.List(dir)
	if err != nil {
		return nil, 0, err
	}
	slices.Sort(names)
	for _, name := range names {
		info, err := fs.Stat(fs.PathJoin(dir, name))
		if err != nil {
			return nil, 0, err
		}
		if info.IsDir() || !validName(name) {
			return nil, 0, fmt.Errorf("unexpected file %q", name)
		}
		files = append(files, file{name, info.Size()})
		total += info.Size()
	}
	if len(files) == 0 {
		return nil, 0, fmt.Errorf("no files in %s", dir)
	}
	return files, total, nil
}

func (m *manifest) encode() ([]byte, error) {
	b := append([]byte(magic), m.id[:]...)
	b = binary.LittleEndian.AppendUint64(b, m.index)
	b = binary.LittleEndian.AppendUint64(b, m.term)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.total))
	for _, f := range m.files {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(f.name)))
		b = append(b, f.name...)
		b = binary.LittleEndian.AppendUint64(b, uint64(f.size))
	}
	if len(b) > maxManifest-checksumSize {
		return nil, fmt.Errorf("%d files are too many", len(m.files))
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli)), nil
}

// parseManifest returns ErrDamaged for bytes that encode never returns.
func parseManifest(b []byte) (*manifest, error) {
	if len(b) < prefixSize+checksumSize || len(b) > maxManifest || string(b[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: %d bytes are no manifest of this format", ErrDamaged, len(b))
	}
	b, sum := b[:len(b)-checksumSize], binary.LittleEndian.Uint32(b[len(b)-checksumSize:])
	if got := crc32.Checksum(b, castagnoli); got != sum {
		return nil, fmt.Errorf("%w: checksum %08x of a manifest, not %08x", ErrDamaged, sum, got)
	}
	m := new(manifest)
	b = b[len(magic)+copy(m.id[:], b[len(magic):]):]
	m.index, m.term = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	total := binary.LittleEndian.Uint64(b[16:])
	if total > math.MaxInt64 {
		return nil, fmt.Errorf("%w: manifest of %d bytes", ErrDamaged, total)
	}
	m.total = int64(total)
	if err := m.parseFiles(b[24:]); err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", ErrDamaged, err)
	}
	return m, nil
}

func (m *manifest) parseFiles(b []byte) error {
	left := m.total
	for len(b) > 0 {
		if len(b) < 2 {
			return io.ErrUnexpectedEOF
		}
		length := int(binary.LittleEndian.Uint16(b))
		b = b[2:]
		if len(b) < length+8 {
			return io.ErrUnexpectedEOF
		}
		name := string(b[:length])
		size := binary.LittleEndian.Uint64(b[length:])
		b = b[length+8:]
		if !validName(name) {
			return fmt.Errorf("invalid file name %q", name)
		}
		if n := len(m.files); n > 0 && name <= m.files[n-1].name {
			return fmt.Errorf("file %q is out of order", name)
		}
		if size > uint64(left) {
			return fmt.Errorf("file %q of %d bytes, %d are left", name, size, left)
		}
		left -= int64(size)
		m.files = append(m.files, file{name, int64(size)})
	}
	if len(m.files) == 0 || left != 0 {
		return fmt.Errorf("%d files with %d bytes too little", len(m.files), left)
	}
	return nil
}

// validName reports whether name is a plain file name on every system. Pebble uses no others.
func validName(name string) bool {
	if name == "" || len(name) > maxName || name[0] == '.' {
		return false
	}
	const allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
	return strings.Trim(name, allowed) == ""
}
