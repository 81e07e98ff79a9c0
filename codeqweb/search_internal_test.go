package codeqweb

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestSearchBounds: a user has one search, or saved list, at a time, all users have two; a search
// that gets no place in time is refused, and one that has ended leaves its place.
func TestSearchBounds(t *testing.T) {
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer q.Close()
	d := Handler(q, &Options{User: func(r *http.Request) string { return r.Header.Get("X-User") }})
	defer d.Close()
	text := ""
	ask := func(user, path string) int {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/"+path, http.NoBody)
		r.Header.Set("X-User", user)
		w := httptest.NewRecorder()
		d.ServeHTTP(w, r)
		text = w.Body.String()
		return w.Code
	}
	search := func(user string) int { return ask(user, "search?q=x") }
	leave, err := d.users.enter(&d.users.searches, "ann", searchesOfUser)
	require.NoError(t, err)
	require.Equal(t, http.StatusTooManyRequests, search("ann"))
	require.Contains(t, text, "one search or saved list of a user runs at a time")
	require.Equal(t, http.StatusTooManyRequests, ask("ann", "save?as=csv"), "it may read as much")
	require.Contains(t, text, "one search or saved list of a user runs at a time")
	require.NotContains(t, text, "Options.User")
	require.Equal(t, http.StatusOK, search("bob"))
	leave()
	require.Equal(t, http.StatusOK, search("ann"))
	require.Equal(t, http.StatusOK, search("ann"))

	require.Equal(t, maxSearches, cap(d.searches))
	synctest.Test(t, func(t *testing.T) {
		places := make(chan struct{}, 1)
		require.NoError(t, enter(t.Context(), places))
		require.ErrorContains(t, enter(t.Context(), places), "too many requests at a time", "after busyWaits")
		<-places
		require.NoError(t, enter(t.Context(), places))
	})
}
