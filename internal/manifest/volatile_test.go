package manifest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// TestVolatile: a node's directory gets a new ID when the end of its logs may be lost, and keeps
// the former one. It keeps these two over any number of losses until it has rejoined.
func TestVolatile(t *testing.T) {
	none, process := new(Volatile), func(boot string) *Volatile { return &Volatile{Boot: boot} }
	for _, tc := range []struct {
		what     string
		before   *Volatile
		closed   bool
		boot     string
		volatile *Volatile
		lost     bool
		kept     *Volatile // in the manifest, after Take
	}{
		{"kill -9", process("1"), false, "1", process("1"), false, process("1")},
		{"power loss", process("1"), false, "2", process("2"), true, nil},
		{"power loss, then on disk", process("1"), false, "2", nil, true, nil},
		{"closed", process("1"), true, "2", process("2"), false, process("2")},
		{"boot not known", process(""), false, "", process(""), true, nil},
		{"boot known again", process(""), false, "1", process("1"), true, nil},
		{"killed, nothing synced", none, false, "1", none, true, nil},
		{"closed, nothing synced", none, true, "1", nil, false, nil},
		{"on disk", nil, false, "2", nil, false, nil},
		{"on disk, then not", nil, false, "2", process("2"), false, process("2")},
		{"kill -9, then on disk: the last life's may not be there", process("1"), false, "1", nil, false, process("1")},
	} {
		t.Run(tc.what, func(t *testing.T) {
			fs := crashfs.New()
			m := Manifest{Format: Format, Shards: 1, ID: "first", Node: "n", Cluster: "c", Volatile: tc.before}
			if !tc.closed {
				m.Open = new(Place)
			}
			require.NoError(t, MakeDirectory(fs, "q"))
			require.NoError(t, New(fs, "q", m).Write())
			d, err := Open(fs, "q", Want{Node: "n"})
			require.NoError(t, err)
			require.NoError(t, d.Take(false, tc.boot, tc.volatile))
			require.NoError(t, d.Close())
			got, err := Read(fs, "q")
			require.NoError(t, err)
			require.Equal(t, tc.kept, got.Volatile)
			if !tc.lost {
				require.Equal(t, "first", got.ID)
				require.Empty(t, got.Former)
				return
			}
			require.NotEqual(t, "first", got.ID)
			require.Equal(t, []string{"first"}, got.Former)
			second := got.ID
			for _, boot := range []string{"3", "4"} {
				d, err = Open(fs, "q", Want{Node: "n"})
				require.NoError(t, err)
				require.NoError(t, d.Take(false, boot, process(boot)))
				require.NoError(t, d.Close())
				require.Equal(t, second, d.ID)
				require.Equal(t, []string{"first"}, d.Former)
				require.Nil(t, d.Volatile)
			}
			d.Rejoined()
			require.NoError(t, d.Write())
			got, err = Read(fs, "q")
			require.NoError(t, err)
			require.Empty(t, got.Former)
			require.Equal(t, process("4"), got.Volatile)
		})
	}
	for what, m := range map[string]Manifest{
		"a node of no cluster has acknowledged nothing":  {},
		"what a founder has acknowledged is on its disk": {Cluster: "c", Founders: []Founder{{Node: "n", ID: "first"}}},
	} {
		m.ID, m.Node, m.Open, m.Volatile = "first", "n", new(Place), process("1")
		m.renew("2", nil)
		require.Equal(t, "first", m.ID, what)
		require.Empty(t, m.Former, what)
	}
}

// TestDiffer: the shards of a standalone queue may be of different moments if the end of their logs
// may be lost, or they were copied one after the other, or an older format has deleted messages.
// They differ until they agree again. A queue after an orderly Close is of one moment.
func TestDiffer(t *testing.T) {
	none, process := new(Volatile), func(boot string) *Volatile { return &Volatile{Boot: boot} }
	for _, tc := range []struct {
		what     string
		before   *Volatile
		closed   bool
		boot     string
		volatile *Volatile
		format   int
		shards   int
		differ   bool
		kept     *Volatile // in the manifest, after Take
	}{
		{"kill -9", process("1"), false, "1", process("1"), Format, 2, false, process("1")},
		{"power loss", process("1"), false, "2", process("2"), Format, 2, true, process("2")},
		{"power loss, then on disk", process("1"), false, "2", nil, Format, 2, true, nil},
		{"one shard", process("1"), false, "2", process("2"), Format, 1, false, process("2")},
		{"closed", process("1"), true, "2", process("2"), Format, 2, false, process("2")},
		{"boot not known", process(""), false, "", process(""), Format, 2, true, process("")},
		{"killed, nothing synced", none, false, "1", none, Format, 2, true, none},
		{"closed, nothing synced", none, true, "1", none, Format, 2, false, none},
		{"on disk", nil, false, "2", nil, Format, 2, false, nil},
		{"on disk, then not", nil, false, "2", process("2"), Format, 2, false, process("2")},
		{"kill -9, then on disk: the last one's may not be there", process("1"), false, "1", nil, Format, 2, false, process("1")},
	} {
		t.Run(tc.what, func(t *testing.T) {
			fs := crashfs.New()
			m := Manifest{Format: tc.format, Shards: tc.shards, ID: "first", Volatile: tc.before}
			if !tc.closed {
				m.Open = new(Place)
			}
			require.NoError(t, MakeDirectory(fs, "q"))
			require.NoError(t, New(fs, "q", m).Write())
			for range 2 { // it stays so if the process ends before they agree
				d, err := Open(fs, "q", Want{})
				require.NoError(t, err)
				require.NoError(t, d.Take(false, tc.boot, tc.volatile))
				require.NoError(t, d.Close())
				got, err := Read(fs, "q")
				require.NoError(t, err)
				require.Equal(t, tc.differ, got.Differ)
				require.Equal(t, tc.kept, got.Volatile)
				if tc.closed || tc.volatile == none { // now it is open, and nothing more is lost
					break
				}
			}
			d, err := Open(fs, "q", Want{})
			require.NoError(t, err)
			require.NoError(t, d.Agree())
			require.NoError(t, d.Close())
			got, err := Read(fs, "q")
			require.NoError(t, err)
			require.False(t, got.Differ)
			require.Equal(t, tc.kept, got.Volatile)
		})
	}
}
