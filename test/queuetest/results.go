package queuetest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/store"
)

// First is the first entry of a range that suits.
func First(t *testing.T, db *pebble.DB, prefix byte, suits func(key, value []byte) bool) (key, value []byte) {
	t.Helper()
	require.NoError(t, store.Scan(db, prefix, func(k, v []byte) error {
		if key == nil && (suits == nil || suits(k, v)) {
			key, value = append([]byte(nil), k...), append([]byte(nil), v...)
		}
		return nil
	}))
	require.NotNil(t, key, "range %x", prefix)
	return key, value
}

func MustStats(t *testing.T, q *codeq.Queue) map[string]codeq.Counts {
	t.Helper()
	stats, err := q.Stats(context.Background())
	require.NoError(t, err)
	return stats
}

// Duplicates returns the holders of the keys that an error says are taken, by
// the index of the task. Any other error ends the test.
func Duplicates(t *testing.T, err error) map[int]codeq.ID {
	t.Helper()
	found := make(map[int]codeq.ID)
	var visit func(error)
	visit = func(err error) {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range joined.Unwrap() {
				visit(e)
			}
			return
		}
		var duplicate *codeq.DuplicateError
		require.ErrorAs(t, err, &duplicate)
		require.NotContains(t, found, duplicate.Index)
		found[duplicate.Index] = duplicate.ID
	}
	if err != nil {
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		visit(err)
	}
	return found
}

// RequireOddTexts requires that two Queues, which are one queue, show tasks with odd texts alike.
func RequireOddTexts(t *testing.T, q, other *codeq.Queue) {
	t.Helper()
	ctx := t.Context()
	const odd = "\ufffd \U0010ff41\x00"
	var ids []codeq.ID
	for i := range 9 {
		ids = append(ids, Produce(t, q, codeq.Task{
			Queue: odd + string(rune('\x80'+i)), Tenant: odd, Group: odd + fmt.Sprint(i), LimitKey: odd, Unique: codeq.Unique{Key: odd + fmt.Sprint(i)},
			Headers: map[string]string{odd: odd}, Payload: []byte(odd),
		})...)
	}
	queue := odd + string(rune('\x80'))
	require.NoError(t, q.DeadLetter(ctx, ClaimNow(t, q, queue).Receipt, errors.New(odd+"\xff")))
	dead, err := other.Get(ctx, ids[0])
	require.NoError(t, err)
	require.Equal(t, queue, dead.Queue)
	require.Equal(t, odd+"\ufffd", dead.LastError)
	require.Equal(t, map[string]string{odd: odd}, dead.Headers)
	for _, id := range ids {
		want, err := q.Get(ctx, id)
		require.NoError(t, err)
		got, err := other.Get(ctx, id)
		require.NoError(t, err)
		want.Result = got.Result // nil, or empty
		require.Empty(t, got.Result)
		require.Equal(t, want, got)
		got, err = other.FindByKey(ctx, codeq.UniqueKey{
			Queue: want.Queue, Tenant: want.Tenant, Group: want.Group, LimitKey: want.LimitKey, Key: want.Unique.Key,
		})
		if want.State != codeq.Dead { // its key is free
			require.NoError(t, err)
			require.Equal(t, want.ID, got.ID)
		}
	}
	var pages []codeq.ID
	for o := (codeq.PageOptions{TaskFilter: codeq.TaskFilter{Tenants: []string{odd}}, Limit: 2}); ; {
		p, err := other.ListPage(ctx, o)
		require.NoError(t, err)
		for _, info := range p.Tasks {
			pages = append(pages, info.ID)
		}
		if o.Cursor = p.Next; o.Cursor == "" {
			break
		}
	}
	require.ElementsMatch(t, ids, pages, "each once")
	infos, err := other.Info(ctx)
	require.NoError(t, err)
	own, err := q.Info(ctx)
	require.NoError(t, err)
	require.Len(t, infos, len(own))
	for i := range infos {
		require.Equal(t, own[i].Queue, infos[i].Queue)
	}
	taken := codeq.Task{Queue: odd + string(rune('\x81')), Tenant: odd, Group: odd + "1", LimitKey: odd, Unique: codeq.Unique{Key: odd + "1"}}
	_, err = other.Produce(ctx, taken)
	var duplicate *codeq.DuplicateError
	require.ErrorAs(t, err, &duplicate)
	require.Equal(t, taken.Unique.Key, duplicate.Key)
}
