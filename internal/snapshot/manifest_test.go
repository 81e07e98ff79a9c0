package snapshot

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testbase"
)

// encode returns a manifest of these files, valid or not.
func encode(total int64, files ...file) []byte {
	b, err := (&manifest{id: [16]byte{7}, index: 5, term: 2, files: files, total: total}).encode()
	if err != nil {
		panic(err)
	}
	return b
}

func TestManifest(t *testing.T) {
	want := []file{{"000001.sst", 1000}, {"MANIFEST-000002", 0}, {"marker.x", 3}, {"z", 0}}
	m, err := parseManifest(encode(1003, want...))
	require.NoError(t, err)
	require.Equal(t, &manifest{id: [16]byte{7}, index: 5, term: 2, files: want, total: 1003}, m)
}

func TestManifestIsRefused(t *testing.T) {
	good := encode(10, file{"a", 10})
	for name, b := range map[string][]byte{
		"nothing":                 {},
		"another magic":           seal(append([]byte("xodeqSM1"), good[len(magic):]...)),
		"trailing byte":           seal(append(bytes.Clone(good), 0)),
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
		"sum of sizes wraps":      encode(-1, file{"a", math.MaxInt64}, file{"b", math.MaxInt64}, file{"c", 1}),
		"total is not signed":     encode(-1<<63, file{"a", -1 << 63}),
		"too long":                seal(make([]byte, maxManifest+1)),
	} {
		_, err := parseManifest(b)
		require.ErrorIs(t, err, ErrDamaged, name)
	}
	for i := range good {
		_, err := parseManifest(good[:i])
		require.ErrorIs(t, err, ErrDamaged, "truncated at %d", i)
		bad := bytes.Clone(good)
		bad[i] ^= 4
		_, err = parseManifest(bad)
		require.ErrorIs(t, err, ErrDamaged, "byte %d", i)
	}
}

// seal gives a manifest a right checksum.
func seal(b []byte) []byte {
	if len(b) < checksumSize {
		return b
	}
	b = bytes.Clone(b[:len(b)-checksumSize])
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// FuzzManifest: an accepted manifest has no other encoding.
func FuzzManifest(f *testing.F) {
	good := encode(30, file{"a", 10}, file{"b", 0}, file{"c", 20})
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(encode(2, file{"b", 1}, file{"a", 1}))
	f.Add(encode(1, file{"../a", 1}))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, err := parseManifest(b)
		if sealed := seal(b); !bytes.Equal(b, sealed) {
			require.ErrorIs(t, err, ErrDamaged)
			b = sealed // nearly all inputs of the fuzzer have a wrong checksum
		}
		var m *manifest
		testbase.BoundDecode(t, len(b), func() { m, err = parseManifest(b) })
		if err != nil {
			require.ErrorIs(t, err, ErrDamaged)
			return
		}
		again, err := m.encode()
		require.NoError(t, err)
		require.Equal(t, b, again)
	})
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
			fs := crashfs.New()
			w, err := fs.Create(recordName, vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			_, err = w.Write(content)
			require.NoError(t, errors.Join(err, w.Close()))
			return readRecord(fs, "")
		}
		_, err := read(body)
		require.ErrorIs(t, err, ErrDamaged)
		var r *record
		testbase.BoundDecode(t, len(body), func() { r, err = read(fmt.Appendf(nil, "%s\n%s", checksumText(body), body)) })
		if err != nil {
			if !strings.Contains(err.Error(), "unknown format") {
				require.ErrorIs(t, err, ErrDamaged)
			}
			return
		}
		require.NotNil(t, r.meta())
		fs := crashfs.New()
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
