package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// requirePrefix: an error that leaves the package begins with its name, which it has once; so
// does each line of joined errors.
func requirePrefix(t *testing.T, what string, err error) {
	t.Helper()
	require.Error(t, err, what)
	for line := range strings.Lines(err.Error()) {
		require.True(t, strings.HasPrefix(line, "codeq: "), "%s: %v", what, err)
		require.Equal(t, 1, strings.Count(line, "codeq: "), "%s: %v", what, err)
	}
}

// TestErrorPrefix calls whatever the package exports in ways that it refuses.
func TestErrorPrefix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 2})
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		live := produce(t, q, codeq.Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		_, err = q.ProduceBatch(t.Context(), []codeq.Task{keyed("k"), keyed("k"), keyed("k")})
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		requirePrefix(t, "duplicates", err)

		var m codeq.Mux
		codeq.Handle(&m, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		// verb calls a method with zero values.
		verb := func(name string, ctx context.Context) (err error) {
			method := reflect.ValueOf(q).MethodByName(name)
			args := []reflect.Value{reflect.ValueOf(&ctx).Elem()}
			for i := range method.Type().NumIn() {
				if in := method.Type().In(i); in != reflect.TypeFor[context.Context]() && !(i > 0 && method.Type().IsVariadic() && i == method.Type().NumIn()-1) {
					args = append(args, reflect.Zero(in))
				}
			}
			if !takesContext(name) {
				args = args[1:]
			}
			out := method.Call(args)
			last := out[len(out)-1]
			if last.Kind() == reflect.Func { // an iterator
				for _, v := range last.Seq2() {
					err, _ = v.Interface().(error)
				}
				return err
			}
			err, _ = last.Interface().(error)
			return err
		}
		mayWork := map[string]bool{
			"Close": true, "Health": true, "Info": true, "ListPage": true, "ProduceBatch": true, "ProcessInfo": true, "PurgeDead": true, "QuietWorkers": true, "RedriveAllDead": true,
			"ResumeWorkers": true, "Schedules": true, "Stats": true, "StorageStats": true, "Subscribe": true, "WaitIdle": true, "WaitReady": true, "Workers": true,
		}
		typ := reflect.TypeFor[*codeq.Queue]()
		for i := range typ.NumMethod() {
			if name := typ.Method(i).Name; !mayWork[name] {
				requirePrefix(t, name, verb(name, t.Context()))
			}
		}

		ended, cancel := context.WithCancelCause(t.Context())
		cancel(fmt.Errorf("%w: shard 7: %w", codeq.ErrFailed, errors.New("a cause")))
		for name, call := range verbsOf(t, q, &m, []codeq.Task{{Queue: "verbs"}}, []codeq.ID{live, live}) {
			if takesContext(name) {
				requirePrefix(t, name, call(nil))
				if name != "Run" {
					requirePrefix(t, name, call(ended))
				}
			}
		}
		_, err = sub.Next(ended)
		requirePrefix(t, "Next", err)
		require.EqualError(t, err, "codeq: context canceled: shard failed: shard 7: a cause")
		require.ErrorIs(t, err, codeq.ErrFailed)

		require.NoError(t, q.Close())
		for name, call := range verbsOf(t, q, &m, []codeq.Task{{Queue: "verbs"}}, []codeq.ID{live, live}) {
			requirePrefix(t, name, call(context.Background()))
		}
	})

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	strange := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(strange, "strange"), nil, 0o600))
	damaged := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(damaged, "CODEQ"), []byte("{"), 0o600))
	for _, dir := range []string{"", file, strange, damaged, filepath.Join(file, "below")} {
		q, err := codeq.Open(dir, nil)
		require.Nil(t, q)
		requirePrefix(t, "Open", err)
		_, err = codeq.Verify(dir, nil)
		requirePrefix(t, "Verify", err)
		requirePrefix(t, "RecoverCluster", codeq.RecoverCluster(dir, nil))
	}
	_, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: -1})
	requirePrefix(t, "Open", err)

	_, err = codeq.NewTask("a", make(chan int))
	requirePrefix(t, "NewTask", err)
	_, err = codeq.ResultAs[int](&codeq.TaskInfo{})
	requirePrefix(t, "ResultAs", err)
	_, err = codeq.ResultAs[int](&codeq.TaskInfo{State: codeq.Done, Result: []byte("x")})
	requirePrefix(t, "ResultAs", err)
	_, err = codeq.ParseID("x")
	requirePrefix(t, "ParseID", err)
	requirePrefix(t, "Receipt", new(codeq.Receipt).UnmarshalText(nil))
	requirePrefix(t, "State", new(codeq.State).UnmarshalText(nil))
}
