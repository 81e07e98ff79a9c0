package codeqtest_test

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqtest"
)

// The program of docs/guide.md: its blocks are parts of this file.

type Order struct {
	Number, Cents int
	Customer      string
}

type Letter struct{ To, Text string }

var errRefused = errors.New("card refused")

// bank charges each key once, and does not answer the first calls.
type bank struct {
	charged map[string]int
	down    int
}

func (b *bank) Charge(_ context.Context, key string, cents int) (string, error) {
	switch {
	case b.down > 0:
		b.down--
		return "", errors.New("no answer")
	case cents > 1000:
		return "", errRefused
	}
	b.charged[key] = cents
	return "receipt of " + key, nil
}

type shop struct {
	bank    *bank
	letters []Letter
}

func open(dir string) (*codeq.Queue, error) {
	return codeq.Open(dir, &codeq.Options{
		MaxAttempts: 10,             // then a dead letter; by default 25
		Retention:   24 * time.Hour, // of results; by default a completed task is deleted
	})
}

func (s *shop) charge(ctx context.Context, job *codeq.Job[Order]) error {
	receipt, err := s.bank.Charge(ctx, job.ID.String(), job.Args.Cents) // one key for all attempts
	if errors.Is(err, errRefused) {
		return codeq.DeadLetter(err) // another attempt is of no use
	}
	if err != nil {
		return err // tried again, after a backoff
	}
	letter, err := codeq.NewTask("letter", Letter{To: job.Args.Customer, Text: "Thank you"})
	if err != nil {
		return err
	}
	job.FollowUp(letter) // produced by the commit that completes this task
	return job.SetResultValue(receipt)
}

func (s *shop) send(_ context.Context, job *codeq.Job[Letter]) error {
	s.letters = append(s.letters, job.Args)
	return nil
}

func (s *shop) handlers() *codeq.Mux {
	mux := new(codeq.Mux)
	codeq.Handle(mux, "charge", s.charge)
	codeq.Handle(mux, "letter", s.send)
	return mux
}

func place(ctx context.Context, q *codeq.Queue, o Order) (codeq.ID, error) {
	task, err := codeq.NewTask("charge", o)
	if err != nil {
		return codeq.ID{}, err
	}
	task.Unique.Key = strconv.Itoa(o.Number)
	task.Unique.For = 24 * time.Hour // also after the end of the task
	task.Group = o.Customer          // the orders of a customer one by one
	task.Timeout = time.Minute       // ends the handler's context
	id, err := q.Produce(ctx, task)
	if errors.Is(err, codeq.ErrDuplicate) {
		return id, nil // of the task that holds the key
	}
	return id, err
}

func receipt(ctx context.Context, q *codeq.Queue, id codeq.ID) (string, error) {
	if _, err := q.Await(ctx, id); err != nil {
		return "", err
	}
	info, err := q.Get(ctx, id) // ErrNotFound after its Retention
	if err != nil {
		return "", err
	}
	return codeq.ResultAs[string](info) // ErrInvalid unless it is Done
}

func serve(ctx context.Context, q *codeq.Queue, s *shop) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := q.Run(ctx, s.handlers(), &codeq.RunOptions{Grace: 20 * time.Second})
	return errors.Join(err, q.Close())
}

func TestShop(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		s := &shop{bank: &bank{charged: make(map[string]int), down: 2}}
		_, err := place(t.Context(), q.Queue, Order{Number: 7, Cents: 100, Customer: "ann"})
		require.NoError(t, err)
		q.Drain(s.handlers()) // the retries wait by a fake clock
		require.Len(t, s.bank.charged, 1)
		require.Len(t, s.letters, 1)
	})
}

// TestGuide runs the parts of the program that TestShop leaves out.
func TestGuide(t *testing.T) {
	t.Parallel()
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		s := &shop{bank: &bank{charged: make(map[string]int)}}
		order := Order{Number: 7, Cents: 100, Customer: "ann"}
		id, err := place(t.Context(), q.Queue, order)
		require.NoError(t, err)
		q.Drain(s.handlers())
		again, err := place(t.Context(), q.Queue, order)
		require.NoError(t, err)
		require.Equal(t, id, again)
		q.Drain(s.handlers())
		require.Len(t, s.letters, 1)
		text, err := receipt(t.Context(), q.Queue, id)
		require.NoError(t, err)
		require.Equal(t, "receipt of "+id.String(), text)

		id, err = place(t.Context(), q.Queue, Order{Number: 8, Cents: 2000, Customer: "ann"})
		require.NoError(t, err)
		q.Drain(s.handlers())
		_, err = receipt(t.Context(), q.Queue, id)
		require.ErrorIs(t, err, codeq.ErrInvalid)
	})
	q, err := open(t.TempDir())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, serve(ctx, q, new(shop)))
}
