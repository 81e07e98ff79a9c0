package codeqweb

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSurvey: one reading runs at a time, the next one after a pause; meanwhile viewers get the
// last result.
func TestSurvey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, failure := 0, error(nil)
		s := newSurvey(func(context.Context) (int, error) {
			n++
			time.Sleep(time.Second)
			return n, failure
		})
		get := func() int {
			t.Helper()
			v, err := s.get(t.Context())
			require.NoError(t, err)
			return v
		}
		go get()
		synctest.Wait()
		require.Equal(t, 1, get(), "it waits for the first one")
		time.Sleep(surveyPause*time.Second - time.Millisecond)
		require.Equal(t, 1, get())
		time.Sleep(time.Millisecond)
		go get()
		synctest.Wait()
		require.Equal(t, 1, get(), "while the second one runs")
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, 2, get())
		time.Sleep(time.Hour)
		failure = errors.New("closed")
		_, err := s.get(t.Context())
		require.ErrorIs(t, err, failure)
		failure = nil
		require.Equal(t, 4, get())
	})
}
