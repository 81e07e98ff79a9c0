package snapshot

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/testalloc"
)

// encode returns the stream of these files, valid or not. total is the sum of sizes in the prefix.
func encode(total uint64, files ...file) []byte {
	b, _ := appendHeader(nil, files)
	binary.LittleEndian.PutUint64(b[len(magic)+4:], total)
	sum := crc32.Checksum(b, castagnoli)
	b = binary.LittleEndian.AppendUint32(b, sum)
	for _, f := range files {
		content := bytes.Repeat([]byte("x"), int(min(uint64(f.size), 1000)))
		sum = crc32.Update(sum, castagnoli, content)
		b = binary.LittleEndian.AppendUint32(append(b, content...), sum)
	}
	return b
}

// unpack writes a stream into the directory "in" of a new file system, in pieces.
func unpack(t testing.TB, stream []byte, piece int) (*vfs.MemFS, error) {
	fs := vfs.NewMem()
	require.NoError(t, fs.MkdirAll("in", 0o755))
	u := newUnpacker(fs, "in")
	for rest := stream; len(rest) > 0; {
		n := min(piece, len(rest))
		if _, err := u.Write(rest[:n:n]); err != nil {
			u.abandon()
			return fs, err
		}
		rest = rest[n:]
	}
	return fs, u.finish()
}

func pack(t testing.TB, fs vfs.FS, dir string) []byte {
	p, size, err := newPacker(fs, dir)
	require.NoError(t, err)
	data, err := io.ReadAll(iotest.OneByteReader(p))
	require.NoError(t, err)
	require.Len(t, data, int(size))
	return data
}

func TestStreamOfSeveralFilesIsTheSameInPiecesOfAnySize(t *testing.T) {
	want := encode(1003, file{"000001.sst", 1000}, file{"MANIFEST-000002", 0}, file{"marker.x", 3}, file{"z", 0})
	for _, piece := range []int{1, 2, 3, 7, 19, 1000, len(want)} {
		fs, err := unpack(t, want, piece)
		require.NoError(t, err, "piece of %d bytes", piece)
		require.Equal(t, want, pack(t, fs, "in"))
	}
}

func TestStreamIsRefused(t *testing.T) {
	good := encode(10, file{"a", 10})
	huge := encode(10, file{"a", 10})
	binary.LittleEndian.PutUint32(huge[len(magic):], math.MaxUint32)
	for name, stream := range map[string][]byte{
		"no stream":               {},
		"another magic":           append([]byte("xodeqSS1"), good[len(magic):]...),
		"huge header":             huge,
		"trailing byte":           append(bytes.Clone(good), 0),
		"no files":                encode(0),
		"empty name":              encode(1, file{"", 1}),
		"separator":               encode(1, file{"../a", 1}),
		"other separator":         encode(1, file{`a\b`, 1}),
		"second name":             encode(2, file{"a", 1}, file{"b/c", 1}),
		"parent":                  encode(1, file{"..", 1}),
		"drive":                   encode(1, file{"c:a", 1}),
		"zero byte":               encode(1, file{"a\x00", 1}),
		"long name":               encode(1, file{strings.Repeat("a", maxName+1), 1}),
		"name twice":              encode(2, file{"a", 1}, file{"a", 1}),
		"out of order":            encode(2, file{"b", 1}, file{"a", 1}),
		"sizes below total":       encode(11, file{"a", 10}),
		"sizes above total":       encode(9, file{"a", 10}),
		"negative size":           encode(10, file{"a", -1}),
		"negative size, balanced": encode(10, file{"a", -1}, file{"b", 11}),
		"sum of sizes wraps":      encode(math.MaxUint64, file{"a", math.MaxInt64}, file{"b", math.MaxInt64}, file{"c", 1}),
		"total is not signed":     encode(1<<63, file{"a", -1 << 63}),
	} {
		t.Run(name, func(t *testing.T) {
			for _, piece := range []int{1, 1000} {
				fs, err := unpack(t, stream, piece)
				require.ErrorIs(t, err, ErrDamaged)
				names, err := fs.List("in")
				require.NoError(t, err)
				if name != "trailing byte" {
					require.Empty(t, names, "refused before the first file")
				}
			}
		})
	}
}

func TestDamagedOrTruncatedStreamIsRefusedAtEveryByte(t *testing.T) {
	good := encode(30, file{"a", 10}, file{"b", 0}, file{"c", 20})
	for i := range good {
		_, err := unpack(t, good[:i], 5)
		require.ErrorIs(t, err, ErrDamaged, "truncated at %d", i)
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			_, err = unpack(t, bad, 5)
			require.ErrorIs(t, err, ErrDamaged, "bit %d of byte %d", bit, i)
		}
	}
}

// A header that is too long is not buffered.
func TestHugeHeaderIsRefusedAtOnce(t *testing.T) {
	prefix := encode(10, file{"a", 10})[:prefixSize]
	binary.LittleEndian.PutUint32(prefix[len(magic):], maxHeader+1)
	_, err := newUnpacker(vfs.NewMem(), "in").Write(prefix)
	require.ErrorIs(t, err, ErrDamaged)
}

// Write must not change its argument, though File.Write may.
func TestStreamIsNotChangedByWriting(t *testing.T) {
	stream := encode(1000, file{"a", 1000})
	want := bytes.Clone(stream)
	u := newUnpacker(scribbler{vfs.NewMem()}, "")
	_, err := u.Write(stream)
	require.NoError(t, err)
	require.Equal(t, want, stream)
}

// scribbler overwrites what is written to its files.
type scribbler struct{ vfs.FS }

func (fs scribbler) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	return scribbledFile{f}, err
}

type scribbledFile struct{ vfs.File }

func (f scribbledFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	clear(p)
	return n, err
}

func TestPackerRefusesFilesThatShrink(t *testing.T) {
	fs := vfs.NewMem()
	require.NoError(t, fs.MkdirAll("d", 0o755))
	f, err := fs.Create("d/a", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write([]byte("0123456789"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	p, _, err := newPacker(fs, "d")
	require.NoError(t, err)
	f, err = fs.Create("d/a", vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = io.ReadAll(p)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.NoError(t, p.close())
}

func FuzzStream(f *testing.F) {
	good := encode(30, file{"a", 10}, file{"b", 0}, file{"c", 20})
	f.Add(good, uint8(1))
	f.Add(good[:len(good)-1], uint8(3))
	f.Add(append(bytes.Clone(good), 'x'), uint8(200))
	f.Add(encode(2, file{"b", 1}, file{"a", 1}), uint8(7))
	f.Add(encode(1, file{"../a", 1}), uint8(7))
	f.Add(encode(1<<63, file{"a", -1}), uint8(7))
	f.Add([]byte(magic), uint8(0))
	f.Add(make([]byte, 64), uint8(9))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		// Since the checksums would refuse nearly all inputs of the fuzzer, they are also tried
		// with right checksums.
		for _, stream := range [][]byte{stream, repair(stream)} {
			fs, err := unpack(t, stream, int(piece)+1)
			_, whole := unpack(t, stream, len(stream)+1)
			require.Equal(t, whole == nil, err == nil, "depends on the pieces")
			root, listErr := fs.List("")
			require.NoError(t, listErr)
			require.Equal(t, []string{"in"}, root)
			if err == nil {
				require.Equal(t, stream, pack(t, fs, "in"))
			}
		}
	})
}

// repair returns the stream with right checksums as far as its header can be read.
func repair(stream []byte) []byte {
	b := bytes.Clone(stream)
	if len(b) < prefixSize {
		return b
	}
	end := prefixSize + int(binary.LittleEndian.Uint32(b[len(magic):]))
	if end < 0 || len(b) < end+checksumSize {
		return b
	}
	sum := crc32.Checksum(b[:end], castagnoli)
	binary.LittleEndian.PutUint32(b[end:], sum)
	total := binary.LittleEndian.Uint64(b[len(magic)+4:])
	files, err := parseHeader(b[prefixSize:end], int64(min(total, math.MaxInt64)))
	if err != nil {
		return b
	}
	rest := b[end+checksumSize:]
	for _, f := range files {
		if int64(len(rest)) < f.size+checksumSize || f.size > math.MaxInt64-checksumSize {
			return b
		}
		sum = crc32.Update(sum, castagnoli, rest[:f.size])
		binary.LittleEndian.PutUint32(rest[f.size:], sum)
		rest = rest[f.size+checksumSize:]
	}
	return b
}

// FuzzRecord: metadata of any content with a right checksum is refused, or can be written again
// unchanged; with a wrong one it is refused.
func FuzzRecord(f *testing.F) {
	good := record{Format: recordFormat, Sequence: 3, Installed: true, Meta: raft.SnapshotMeta{
		Version: 1, ID: "3-7-1", Index: 7, Term: 3, ConfigurationIndex: 1, Size: 12, Peers: []byte("p"),
		Configuration: raft.Configuration{Servers: []raft.Server{{ID: "n", Address: "a:1"}}},
	}}
	body, err := json.Marshal(good)
	require.NoError(f, err)
	f.Add(body)
	f.Add(body[:len(body)-1])
	f.Add([]byte(`{"Format":2}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		read := func(content []byte) (*record, error) {
			fs := vfs.NewMem()
			w, err := fs.Create(recordName, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			_, err = w.Write(content)
			require.NoError(t, errors.Join(err, w.Close()))
			return readRecord(fs, "")
		}
		_, err := read(body)
		require.ErrorIs(t, err, ErrDamaged)
		var r *record
		testalloc.Decode(t, len(body), func() { r, err = read(fmt.Appendf(nil, "%s\n%s", checksumText(body), body)) })
		if err != nil {
			if !strings.Contains(err.Error(), "unknown format") {
				require.ErrorIs(t, err, ErrDamaged)
			}
			return
		}
		require.NotNil(t, r.meta())
		fs := vfs.NewMem()
		_, err = writeRecord(fs, "", r)
		require.NoError(t, err)
		again, err := readRecord(fs, "")
		require.NoError(t, err)
		// Nil and empty lists are equal.
		a, err := json.Marshal(r)
		require.NoError(t, err)
		b, err := json.Marshal(again)
		require.NoError(t, err)
		require.Equal(t, string(a), string(b))
	})
}
