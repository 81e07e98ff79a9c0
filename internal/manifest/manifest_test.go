package manifest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/testbase"
)

// TestPebbleFormat: each format of directories has one format of Pebble, which changes only with
// it. So older builds of a cluster can read every store that they may get.
func TestPebbleFormat(t *testing.T) {
	golden := map[int]uint64{7: 19, 8: 19, 9: 19}
	require.Len(t, pebbleFormats, len(golden))
	for format := OldestFormat; format <= Format; format++ {
		require.Equal(t, golden[format], PebbleFormat(format), "format %d", format)
	}
}

// FuzzManifest: with any content of the manifest, Open refuses the directory for one of its
// documented reasons, or the manifest can be written again unchanged.
func FuzzManifest(f *testing.F) {
	for _, m := range []Manifest{
		{Format: Format, Shards: 3, ID: "00112233445566778899aabbccddeeff"},
		{Format: Format, Shards: 1, ID: "00", Creating: true, Node: "n1"},
		{Format: Format + 1, Shards: 1},
		{Format: Format, Shards: MaxShards + 1},
	} {
		b, err := m.Encode()
		require.NoError(f, err)
		f.Add(b, m.Node)
	}
	f.Add([]byte("{}"), "")
	f.Add([]byte(nil), "")
	f.Fuzz(func(t *testing.T, content []byte, node string) {
		fs := crashfs.New()
		require.NoError(t, fs.MkdirAll("q", 0o755))
		w, err := fs.Create("q/"+Name, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = w.Write(content)
		require.NoError(t, errors.Join(err, w.Close()))
		var m *Manifest
		testbase.BoundDecode(t, len(content), func() { m, err = Read(fs, "q") })
		if err != nil {
			known := false
			for _, target := range []error{base.ErrNotQueue, base.ErrFormat, base.ErrCorrupt} {
				known = known || errors.Is(err, target)
			}
			require.True(t, known, "%v", err)
			return
		}
		require.NotNil(t, m)
		require.Equal(t, node != m.Node, errors.Is(m.admit(Want{Node: node}), base.ErrNotMember))
		require.True(t, m.Format >= OldestFormat && m.Format <= Format)
		require.True(t, m.Shards >= 1 && m.Shards <= MaxShards)
		d := New(fs, "q", *m)
		require.NoError(t, d.Write())
		again, err := Read(fs, "q")
		require.NoError(t, err)
		require.Equal(t, m, again)
	})
}

// TestCheckIdentity: only the identities of a directory's format and of older formats are accepted.
func TestCheckIdentity(t *testing.T) {
	m := Manifest{Format: Format, Shards: 2, ID: "id"}
	for f := OldestFormat; f <= Format; f++ {
		old, err := m.CheckIdentity(1, fmt.Appendf(nil, "codeq %d id 1/2", f))
		require.NoError(t, err)
		require.Equal(t, f < Format, old)
	}
	for _, other := range []string{"codeq 6 id 1/2", fmt.Sprintf("codeq %d id 1/2", Format+1), "codeq 7 id 0/2", "codeq 7 other 1/2", ""} {
		_, err := m.CheckIdentity(1, []byte(other))
		require.ErrorIs(t, err, base.ErrCorrupt)
	}
	m.Format = OldestFormat
	_, err := m.CheckIdentity(1, []byte("codeq 8 id 1/2"))
	require.ErrorIs(t, err, base.ErrCorrupt, "a shard of a newer format than its directory")
}

// TestFoundByOldQueue: a standalone queue of any format becomes a node, with a format for nodes,
// and can be opened again after a kill.
func TestFoundByOldQueue(t *testing.T) {
	for f := OldestFormat; f <= Format; f++ {
		fs := crashfs.New()
		require.NoError(t, MakeDirectory(fs, "q"))
		require.NoError(t, New(fs, "q", Manifest{Format: f, Shards: 1, ID: "id"}).Write())
		d, err := Open(fs, "q", Want{Node: "n", Founds: true})
		require.NoError(t, err)
		d.Found("n", "address")
		require.NoError(t, errors.Join(d.Take(false, "boot", nil), d.Close()))
		d, err = Open(fs, "q", Want{Node: "n"})
		require.NoError(t, err, "format %d", f)
		require.Equal(t, max(f, OldestOfNodes), d.Format)
		old, err := d.CheckIdentity(0, []byte((&Manifest{ID: "id", Shards: 1}).identityOf(f, 0)))
		require.NoError(t, err)
		require.Equal(t, f < Format, old)
		require.NoError(t, d.Close())
	}
}

// TestReplicaFormat: a replica has the format of its identity. The errors distinguish an unknown
// format from a damaged identity.
func TestReplicaFormat(t *testing.T) {
	for f := OldestFormat; f <= Format; f++ {
		got, err := ReplicaFormat(1, 2, []byte(ReplicaIdentity(f, 1, 2)))
		require.NoError(t, err)
		require.Equal(t, f, got)
	}
	for other, what := range map[int]string{OldestFormat - 1: "begin anew", Format + 1: "open it with a version that knows it"} {
		_, err := ReplicaFormat(1, 2, []byte(ReplicaIdentity(other, 1, 2)))
		require.ErrorIs(t, err, base.ErrFormat)
		require.ErrorContains(t, err, fmt.Sprintf("shard 1: codeq: unknown storage format: %d, this version knows", other))
		require.ErrorContains(t, err, what)
	}
	for _, damaged := range []string{"codeq 7 replicated 0/2", "codeq 7 id 1/2", "codeq 07 replicated 1/2", "codeq", ""} {
		_, err := ReplicaFormat(1, 2, []byte(damaged))
		require.ErrorIs(t, err, base.ErrCorrupt, damaged)
	}
}
