package codeq

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
)

// requirePrefix: an error that leaves the package begins with its name, which it has once, as
// has each line of joined errors.
func requirePrefix(t *testing.T, what string, err error) {
	t.Helper()
	require.Error(t, err, what)
	for line := range strings.Lines(err.Error()) {
		require.True(t, strings.HasPrefix(line, errorPrefix), "%s: %v", what, err)
		require.Equal(t, 1, strings.Count(line, errorPrefix), "%s: %v", what, err)
	}
}

// TestErrorPrefix calls whatever the package exports in ways that it refuses.
func TestErrorPrefix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2})
		sub, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		live := produce(t, q, Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		_, err = q.ProduceBatch(t.Context(), []Task{keyed("k"), keyed("k"), keyed("k")})
		require.ErrorIs(t, err, ErrDuplicate)
		requirePrefix(t, "duplicates", err)

		var m Mux
		Handle(&m, "verbs", func(context.Context, *Job[[]byte]) error { return nil })
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
			"Close": true, "ProduceBatch": true, "PurgeDead": true, "RedriveAllDead": true, "Schedules": true, "Stats": true, "StorageStats": true,
			"Subscribe": true, "WaitIdle": true,
		}
		typ := reflect.TypeFor[*Queue]()
		for i := range typ.NumMethod() {
			if name := typ.Method(i).Name; !mayWork[name] {
				requirePrefix(t, name, verb(name, t.Context()))
			}
		}

		ended, cancel := context.WithCancelCause(t.Context())
		cancel(fmt.Errorf("%w: shard 7: %w", ErrFailed, errors.New("a cause")))
		for name, call := range verbsOf(q, &m, []Task{{Queue: "verbs"}}, []ID{live, live}) {
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
		require.ErrorIs(t, err, ErrFailed)

		require.NoError(t, q.Close())
		for name, call := range verbsOf(q, &m, []Task{{Queue: "verbs"}}, []ID{live, live}) {
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
		q, err := Open(dir, nil)
		require.Nil(t, q)
		requirePrefix(t, "Open", err)
		_, err = Verify(dir, nil)
		requirePrefix(t, "Verify", err)
		requirePrefix(t, "RecoverCluster", RecoverCluster(dir, nil))
	}
	_, err := Open(t.TempDir(), &Options{Shards: -1})
	requirePrefix(t, "Open", err)

	_, err = NewTask("a", make(chan int))
	requirePrefix(t, "NewTask", err)
	_, err = ResultAs[int](&TaskInfo{})
	requirePrefix(t, "ResultAs", err)
	_, err = ResultAs[int](&TaskInfo{State: Done, Result: []byte("x")})
	requirePrefix(t, "ResultAs", err)
	_, err = ParseID("x")
	requirePrefix(t, "ParseID", err)
	requirePrefix(t, "Receipt", new(Receipt).UnmarshalText(nil))
	requirePrefix(t, "State", new(State).UnmarshalText(nil))
}
