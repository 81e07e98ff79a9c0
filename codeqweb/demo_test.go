package codeqweb_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"testing"
	"time"

	"codeq"
	"codeq/codeqweb"
)

func TestDemo(t *testing.T) {
	addr := os.Getenv("DEMO")
	if addr == "" {
		t.Skip()
	}
	s, ids := loaded(t, as(codeqweb.All))
	fmt.Println(ids)
	s.work("worker-2", "orders", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		time.Sleep(20 * time.Millisecond)
		if j.ID[15]%7 == 0 {
			return errors.New("the bank does not answer")
		}
		return nil
	})
	go func() {
		for {
			_, _ = s.q.Produce(context.Background(), codeq.Task{Queue: "orders", MaxAttempts: 3})
			time.Sleep(15 * time.Millisecond)
		}
	}()
	srv := &http.Server{Addr: addr, Handler: http.StripPrefix("/codeq", s.d)}
	go srv.ListenAndServe()
	time.Sleep(10 * time.Minute)
}
