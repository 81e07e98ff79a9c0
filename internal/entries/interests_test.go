package entries

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// interested is a node and the values that its shards have stored.
type interested struct {
	*Interests
	hub    Hub
	before func()

	mu     sync.Mutex // guards the fields below
	shards [2]keys.InterestValue
	stored int  // sets
	broken bool // the second shard is
}

func newInterested() *interested {
	n := &interested{before: func() {}}
	n.Interests = NewInterests(7, n.hub.Wanted, n.store)
	n.hub.Less = n.Less
	return n
}

func (n *interested) store(_ context.Context, v keys.InterestValue) error {
	n.before()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stored++
	for i := range n.shards {
		if n.broken && i == 1 {
			return errors.New("it was given up")
		}
		n.shards[i] = v
	}
	return nil
}

func (n *interested) publish() error { return n.Publish(context.Background()) }

func (n *interested) keep(kinds engine.KindSet) error { return n.Keep(context.Background(), kinds) }

func (n *interested) requireStored(t *testing.T, kinds engine.KindSet) {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range n.shards {
		require.Equal(t, kinds, engine.KindSet(v.Kinds))
	}
}

// sets returns the number of stored sets.
func (n *interested) sets() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.stored
}

func (n *interested) setBroken(broken bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.broken = broken
}

// TestInterestsHalfStored: after a set was stored in some shards only, the next one is stored in
// all, with a larger number, also if it equals the set before.
func TestInterestsHalfStored(t *testing.T) {
	n := newInterested()
	require.NoError(t, n.keep(3))
	n.requireStored(t, 3)
	n.broken = true
	require.Error(t, n.keep(4))
	require.Equal(t, [2]keys.InterestValue{{Kinds: 7, Incarnation: 7, Number: 2}, {Kinds: 3, Incarnation: 7, Number: 1}}, n.shards)
	n.broken = false
	require.NoError(t, n.publish())
	require.Equal(t, [2]keys.InterestValue{{Kinds: 3, Incarnation: 7, Number: 3}, {Kinds: 3, Incarnation: 7, Number: 3}}, n.shards)
	n.shards = [2]keys.InterestValue{}
	require.NoError(t, n.publish())
	n.requireStored(t, 0) // publish does not store the same set again
}

// TestWithdraw: interests of an earlier incarnation, and interests without a subscription or call,
// are withdrawn after a pause, also if the first try fails. If an interest is needed again during
// the pause, nothing is stored.
func TestWithdraw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newInterested()
		n.shards = [2]keys.InterestValue{{Kinds: 9, Incarnation: 6, Number: 1}, {Kinds: 9, Incarnation: 6, Number: 1}}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { n.Withdraw(ctx); close(ended) }()
		time.Sleep(withdrawAfter)
		synctest.Wait()
		n.requireStored(t, 0)

		subscribe := func() *Subscription {
			sub, err := n.hub.Subscribe(6, nil, 1)
			require.NoError(t, err)
			require.NoError(t, n.publish())
			return sub
		}
		first := subscribe()
		require.NoError(t, n.keep(8))
		require.NoError(t, n.keep(8))
		n.requireStored(t, 14)
		sets := n.sets()
		first.Close()
		n.Release(8)
		subscribe().Close()
		time.Sleep(withdrawAfter - 1)
		require.NoError(t, n.keep(8))
		n.Release(8)
		n.requireStored(t, 14)
		require.Equal(t, sets, n.sets())
		n.setBroken(true)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, sets+1, n.sets())
		n.setBroken(false)
		time.Sleep(withdrawAfter)
		synctest.Wait()
		n.requireStored(t, 8)
		n.Release(8)
		time.Sleep(2 * withdrawAfter)
		synctest.Wait()
		n.requireStored(t, 0)
		sets = n.sets()
		time.Sleep(time.Hour)
		require.Equal(t, sets, n.sets(), "then it sleeps")
		stop()
		<-ended
	})
}

// TestWithdrawBesideSubscribe: a subscription or a call may begin during a withdrawal. It goes on
// after its interests are stored again.
func TestWithdrawBesideSubscribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newInterested()
		require.NoError(t, n.keep(8))
		sub, err := n.hub.Subscribe(6, nil, 1)
		require.NoError(t, err)
		require.NoError(t, n.publish())
		n.requireStored(t, 14)
		sub.Close()
		n.Release(8)
		withdrawing, goOn := make(chan struct{}), make(chan struct{})
		n.before = func() {
			n.before = func() {}
			close(withdrawing)
			<-goOn
		}
		done := make(chan error, 3)
		go func() { done <- n.publish() }()
		<-withdrawing
		go func() { done <- n.keep(8) }()
		go func() {
			_, err := n.hub.Subscribe(2, nil, 1)
			done <- errors.Join(err, n.publish())
		}()
		synctest.Wait()
		require.Empty(t, done)
		close(goOn)
		for range 3 {
			require.NoError(t, <-done)
		}
		n.requireStored(t, 10)
	})
}
