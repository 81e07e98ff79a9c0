package codeq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func (q *Queue) checkAll() error {
	var errs []error
	for i, s := range q.shards {
		v, err := q.view(s)
		if err != nil {
			return err
		}
		errs = append(errs, v.check(i, len(q.shards)))
		v.close()
	}
	return errors.Join(errs...)
}

func TestLifeOfATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := Open(t.TempDir(), &Options{Shards: 2, Retention: time.Hour})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		id, err := q.Produce(ctx, Task{Queue: "a", Payload: []byte("x"), Headers: map[string]string{"k": "v"}, Tenant: "t", Priority: 3})
		require.NoError(t, err)
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.Equal(t, "x", string(l.Payload))
		require.Equal(t, "v", l.Headers["k"])
		require.NoError(t, q.checkAll())
		require.NoError(t, q.Retry(ctx, l.Receipt, RetryOptions{Err: errors.New("boom")}))
		require.NoError(t, q.checkAll())
		l2, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, 2, l2.Attempt)
		require.Equal(t, "boom", l2.LastError)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), ErrLeaseLost)
		require.NoError(t, q.checkAll())
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, q.Complete(ctx, l2.Receipt, nil), ErrLeaseLost)
		l3, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.NoError(t, err)
		require.Equal(t, 3, l3.Attempt)
		require.NoError(t, q.Complete(ctx, l3.Receipt, []byte("r"), Task{Queue: "b"}))
		require.NoError(t, q.checkAll())
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, Done, info.State)
		require.Equal(t, "r", string(info.Result))
		st, err := q.Stats(ctx)
		require.NoError(t, err)
		fmt.Println(st)
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		_, err = q.Get(ctx, id)
		require.ErrorIs(t, err, ErrNotFound)
		require.NoError(t, q.checkAll())
	})
}
