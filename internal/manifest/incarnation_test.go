package manifest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
)

// TestIncarnations: each open of a node's directory begins an incarnation with a larger number, and
// stores it, also if the clock was set back or the directory is an older copy.
func TestIncarnations(t *testing.T) {
	fs := crashfs.New()
	begin := func() uint64 {
		d, err := Open(fs, "q", Want{Shards: 1, Node: "n"})
		require.NoError(t, err)
		require.NoError(t, d.Take(false, "", nil))
		require.NoError(t, d.Close()) // like a kill of its process
		return d.Incarnation
	}
	first := begin()
	fs = fs.CrashClone(vfs.CrashCloneCfg{})
	m, err := Read(fs, "q")
	require.NoError(t, err)
	require.Equal(t, first, m.Incarnation)
	require.WithinDuration(t, time.Now(), time.UnixMilli(int64(first>>incarnationChance)), time.Minute)
	second := begin()
	require.Greater(t, second, first)

	synctest.Test(t, func(t *testing.T) { // at the year 2000
		third := begin()
		require.Greater(t, third, second)
		require.NotEqual(t, IncarnationAfter(second), IncarnationAfter(second), "of copies of the directory")
		copied := IncarnationAfter(0)
		time.Sleep(time.Second)
		require.Greater(t, IncarnationAfter(0), copied)
	})
	d, err := Open(fs, "alone", Want{Shards: 1})
	require.NoError(t, err)
	require.NoError(t, d.Take(false, "", nil))
	require.Zero(t, d.Incarnation)
	require.NoError(t, d.Close())
}

// reopened returns the manifest of a directory, as on disk, after the beginning of its next
// incarnation.
func (m Manifest) reopened(t *testing.T) Manifest {
	t.Helper()
	fs := crashfs.New()
	require.NoError(t, MakeDirectory(fs, "q"))
	d := New(fs, "q", m)
	require.NoError(t, d.Take(true, "", nil))
	got, err := Read(fs, "q")
	require.NoError(t, err)
	return *got
}

// meets returns the verdict of a node that sees the directory o. The node is then restarted.
func (m *Manifest) meets(t *testing.T, o Manifest) error {
	t.Helper()
	_, err := m.See(o.ID, o.Incarnations())
	*m = m.reopened(t)
	return err
}

// TestOlderCopy: a node accepts a directory again after any of its incarnations, and refuses an
// older copy if it has seen a later incarnation. The number of unseen incarnations of both, and
// their clocks, make no difference.
func TestOlderCopy(t *testing.T) {
	node := func(id string) Manifest {
		return Manifest{Format: Format, Shards: 1, ID: id, Node: "n" + id, Cluster: "c"}.reopened(t)
	}
	other := node("other")
	first := node("first")
	require.NoError(t, other.meets(t, first))
	require.NoError(t, other.meets(t, first), "again")
	unseen := first.reopened(t).reopened(t)
	require.NoError(t, other.meets(t, unseen))
	require.NoError(t, other.meets(t, unseen.reopened(t)))

	later := unseen.reopened(t)
	require.ErrorIs(t, other.meets(t, later), base.ErrOldCopy, "an incarnation that it does not know was seen")
	require.ErrorContains(t, other.meets(t, later), "directory first was seen in incarnation")

	// A copy. Its incarnations have smaller numbers than the seen ones, since the clock was set
	// back.
	second := node("second")
	copied := second
	second.Incarnation += 1 << 50
	require.NoError(t, other.meets(t, second))
	for range 3 * MaxIncarnations {
		copied = copied.reopened(t)
		require.Less(t, copied.Incarnation, second.Incarnation)
		require.ErrorIs(t, other.meets(t, copied), base.ErrOldCopy)
		require.LessOrEqual(t, len(copied.Incarnations()), MaxIncarnations)
	}
	// A copy is accepted by a node that has not seen the original.
	copied.ForgetEarlier()
	ignorant := node("ignorant")
	require.NoError(t, ignorant.meets(t, copied))

	// A directory was opened often, and each time the last answer to it was lost.
	third := node("third")
	require.NoError(t, other.meets(t, third))
	third.ForgetEarlier()
	for range 3 * MaxIncarnations {
		third = third.reopened(t)
	}
	require.NoError(t, other.meets(t, third))

	// The copy is another directory when it is opened again.
	copied.Outdated, copied.Founders = true, []Founder{{Node: "n"}}
	renewed := copied.reopened(t)
	require.NotEqual(t, copied.ID, renewed.ID)
	require.Equal(t, []string{"second"}, renewed.Former)
	require.False(t, renewed.Outdated)
	require.Empty(t, renewed.Founders)
	require.NoError(t, other.meets(t, renewed))
	require.Equal(t, renewed.ID, renewed.reopened(t).ID)
	require.Len(t, other.Seen, 4)
}

// TestLeftAreNotSeen: after Leave, the manifest of a standalone queue has no incarnations of its
// own or of other nodes.
func TestLeftAreNotSeen(t *testing.T) {
	fs := crashfs.New()
	require.NoError(t, MakeDirectory(fs, "q"))
	d := New(fs, "q", Manifest{Format: Format, Shards: 1, Node: "n", Incarnation: 7, Earlier: []uint64{3}, Seen: map[string]uint64{"a": 5}, Outdated: true})
	require.NoError(t, d.Leave())
	require.Equal(t, Manifest{Format: Format, Shards: 1, Left: true}, d.Manifest)
}
