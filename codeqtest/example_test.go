package codeqtest_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqtest"
)

// Mail is the payload of the tasks in the queue "mail".
type Mail struct {
	To       string
	Template string
}

// signUp is the code under test: it produces a welcome for a new customer, and a reminder three
// days later.
func signUp(ctx context.Context, q *codeq.Queue, address string) error {
	welcome, err := json.Marshal(Mail{To: address, Template: "welcome"})
	if err != nil {
		return err
	}
	reminder, err := json.Marshal(Mail{To: address, Template: "reminder"})
	if err != nil {
		return err
	}
	_, err = q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail", Payload: welcome, Priority: 5},
		{Queue: "mail", Payload: reminder, RunAt: time.Now().Add(72 * time.Hour)},
	})
	return err
}

// mailer is also code under test: it works on the queue "mail".
type mailer struct {
	send func(Mail) error
}

func (m *mailer) handle(_ context.Context, job *codeq.Job[Mail]) error { return m.send(job.Args) }

// TestExample shows how a program tests its use of codeq.
func TestExample(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		var sent []string
		server := errors.New("the mail server is down") // to begin with
		m := &mailer{send: func(mail Mail) error {
			if server == nil {
				sent = append(sent, mail.Template)
			}
			return server
		}}
		var mux codeq.Mux
		codeq.Handle(&mux, "mail", m.handle)

		require.NoError(t, signUp(t.Context(), q.Queue, "gopher@example.com"))

		// What has been produced?
		welcome := codeqtest.RequireProduced(t, q, "mail", func(m Mail) bool { return m.Template == "welcome" })
		require.Equal(t, 5, welcome.Priority)
		reminder := codeqtest.RequireProduced(t, q, "mail", func(m Mail) bool { return m.Template == "reminder" })
		require.WithinDuration(t, time.Now().Add(72*time.Hour), reminder.RunAt, 0)
		codeqtest.RequireNotProduced(t, q, "mail", func(m Mail) bool { return m.To == "" })

		// Only the welcome is due, and cannot be sent.
		q.Work(&mux)
		require.Empty(t, sent)

		// It is tried again a second later.
		server = nil
		q.Advance(time.Second)
		q.Work(&mux)
		require.Equal(t, []string{"welcome"}, sent)

		// The rest takes three days.
		q.Drain(&mux)
		require.Equal(t, []string{"welcome", "reminder"}, sent)
		codeqtest.RequireAllDone(t, q)
	})
}
