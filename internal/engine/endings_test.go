package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestEndings: a shard keeps the end of a task for a while.
func TestEndings(t *testing.T) {
	var e endings
	done := &Outcome{State: Done, Result: []byte("result"), LastError: "before", Attempts: 2}
	e.add(keys.ID{1}, 1, done.State, 2, done.Result, done.LastError)
	e.add(keys.ID{2}, 1, Canceled, 0, nil, "")
	require.Equal(t, done, e.find(keys.ID{1}, 1+endingsFor))
	require.Equal(t, &Outcome{State: Canceled}, e.find(keys.ID{2}, 1+endingsFor))
	require.Nil(t, e.find(keys.ID{1}, 2+endingsFor), "long ago")
	require.Nil(t, e.find(keys.ID{3}, 1))
}
