package integrity

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/platform"
)

// checkManifests looks for flipped bits in the MANIFESTs of a store without a seal; Pebble stops
// reading them at the first incomplete record. A MANIFEST is synced at each of its records, so a
// complete record after an incomplete one is damage. So is a record that one flipped bit would make
// complete, unless only zeros follow that bit. A log cannot be checked so: a power loss may take
// any unsynced part and leave later parts.
func checkManifests(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, manifestPrefix) {
			continue
		}
		b, err := platform.ReadFile(fs, fs.PathJoin(dir, name))
		if err != nil {
			return err
		}
		if manifest(b).isDamaged() {
			return damaged(dir, name, "has a flipped bit, or a record after one that is not whole")
		}
	}
	return nil
}

// The format is that of LevelDB: blocks, each a sequence of chunks and fewer zeros than a header
// has bytes. A chunk is the masked CRC-32C of everything after the length; the length of its data;
// its kind; the data.
const (
	blockBytes  = 32 << 10
	headerBytes = 4 + 2 + 1
)

// The kinds of chunks.
const (
	kindFull  = 1
	kindFirst = 2
	kindLast  = 4
)

// manifest is the content of a MANIFEST.
type manifest []byte

// isDamaged reads chunks up to the first incomplete one.
func (m manifest) isDamaged() bool {
	for from := 0; from < len(m); from += blockBytes {
		block := m[from:min(from+blockBytes, len(m))]
		for len(block) >= headerBytes {
			n, ok := whole(block)
			if ok {
				block = block[n:]
				continue
			}
			next := m[min(from+blockBytes, len(m)):]
			return hasFlip(block, isZero(next)) || goesOn(block, next)
		}
	}
	return false
}

// whole returns the length of the chunk at the beginning of b, and reports whether it is complete.
func whole(b []byte) (n int, ok bool) {
	if len(b) < headerBytes {
		return 0, false
	}
	n = headerBytes + int(binary.LittleEndian.Uint16(b[4:]))
	if n > len(b) || binary.LittleEndian.Uint32(b) != masked(crc32.Checksum(b[6:n], castagnoli)) {
		return 0, false
	}
	return n, hasKind(b)
}

// hasKind reports whether the kind in the header of a chunk exists.
func hasKind(b []byte) bool { return kindFull <= b[6] && b[6] <= kindLast }

// hasFlip reports whether one flipped bit would make the chunk at the beginning of b complete.
// last: only zeros follow b.
func hasFlip(b []byte, last bool) bool {
	if len(b) < headerBytes {
		return false
	}
	want := unmasked(binary.LittleEndian.Uint32(b))
	length := int(binary.LittleEndian.Uint16(b[4:]))
	if n := headerBytes + length; n <= len(b) {
		have := crc32.Checksum(b[6:n], castagnoli)
		if hasKind(b) && bits.OnesCount32(masked(have)^binary.LittleEndian.Uint32(b)) == 1 {
			return true
		}
		if at, bit, ok := flipOf(have^want, n-6); ok {
			repaired := append([]byte(nil), b[:headerBytes]...)
			if 6+at < headerBytes {
				repaired[6+at] ^= 1 << bit
			}
			mayBeTorn := last && isZero(b[6+at:])
			return hasKind(repaired) && !mayBeTorn
		}
	}
	for bit := range 16 {
		n := headerBytes + (length ^ 1<<bit)
		if n <= len(b) && hasKind(b) && crc32.Checksum(b[6:n], castagnoli) == want {
			return true
		}
	}
	return false
}

// flipOf finds the bit of n bytes that changes their CRC by difference.
func flipOf(difference uint32, n int) (at int, bit uint, ok bool) {
	var by [8]uint32 // the change of the CRC by each bit of the byte
	for i := range by {
		by[i] = castagnoli[1<<i]
	}
	for at = n - 1; at >= 0; at-- {
		for i := range by {
			if by[i] == difference {
				return at, uint(i), true
			}
			by[i] = castagnoli[byte(by[i])] ^ by[i]>>8 // one byte further from the end
		}
	}
	return 0, 0, false
}

// goesOn reports whether a record begins after the chunk at the beginning of b.
func goesOn(b, next []byte) bool {
	if len(b) < headerBytes {
		return false
	}
	begins := func(b []byte) bool {
		_, ok := whole(b)
		return ok && b[6] <= kindFirst
	}
	if n := headerBytes + int(binary.LittleEndian.Uint16(b[4:])); n <= len(b) && begins(b[n:]) {
		return true
	}
	for ; len(next) > 0; next = next[min(blockBytes, len(next)):] {
		if begins(next[:min(blockBytes, len(next))]) {
			return true
		}
	}
	return false
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// masked returns a CRC in LevelDB's stored form.
func masked(crc uint32) uint32 { return bits.RotateLeft32(crc, 17) + 0xa282ead8 }

func unmasked(stored uint32) uint32 { return bits.RotateLeft32(stored-0xa282ead8, -17) }
