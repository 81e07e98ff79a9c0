package codeq_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
)

func TestCommitsAreCounted(t *testing.T) {
	t.Parallel()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	require.Zero(t, inspect.Of(q).Commits())
	for i := range uint64(3) {
		_, err := q.Produce(context.Background(), codeq.Task{Queue: "mail"})
		require.NoError(t, err)
		require.Equal(t, i+1, inspect.Of(q).Commits())
	}
	_, err = q.Stats(context.Background()) // writes nothing
	require.NoError(t, err)
	require.EqualValues(t, 3, inspect.Of(q).Commits())
}
