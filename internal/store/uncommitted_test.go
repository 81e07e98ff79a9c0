package store

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestUncommitted: a task is where the group has put it last, and nowhere known after another
// change.
func TestUncommitted(t *testing.T) {
	t.Parallel()
	var u Uncommitted[string]
	a, b := keys.ID{1}, keys.ID{2}
	for range 2 {
		require.False(t, u.HasAny())
		require.False(t, u.IsChanged(a))
		u.Put(a, "lane", keys.Place{Range: keys.Task, At: 1}, []byte("1"))
		u.Put(b, "other", keys.Place{Range: keys.Dead}, nil)
		u.Put(a, "lane", keys.Place{Range: keys.Task, At: 2}, []byte("2"))
		require.Equal(t, &Placed[string]{"lane", keys.Place{Range: keys.Task, At: 2}, []byte("2")}, u.Find(a))
		u.Change(a)
		require.Nil(t, u.Find(a))
		require.True(t, u.IsChanged(a))
		require.NotNil(t, u.Find(b))
		require.False(t, u.HasChildren(a))
		u.AddChild(a)
		require.True(t, u.HasChildren(a))
		u.Forget()
		require.False(t, u.HasChildren(a))
		require.Nil(t, u.Find(b))
	}
	u.AddChild(b)
	require.True(t, u.HasAny())
}
