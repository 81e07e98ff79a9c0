package codeqweb_test

import (
	"compress/gzip"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestCompressed: clients that take it get pages and assets compressed; an unchanged answer is not
// sent again.
func TestCompressed(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	id := s.produce(codeq.Task{Queue: "a", Payload: make([]byte, 10_000)})
	for _, path := range []string{assetPath(s, "style.css"), assetPath(s, "live.js"), "/task?id=" + id.String(), "/api/v1/task?id=" + id.String()} {
		for accepted, packed := range map[string]bool{"gzip, br": true, "br, gzip;q=0.5": true, "": false, "br": false, "gzip;q=0": false, "gzip; q=0.0": false} {
			r := request(http.MethodGet, path, nil)
			r.Header.Set("Accept-Encoding", accepted)
			w := s.do(r)
			require.Equal(t, http.StatusOK, w.Code, path)
			require.Equal(t, "Accept-Encoding", w.Header().Get("Vary"), path)
			if !packed {
				require.Empty(t, w.Header().Get("Content-Encoding"), path)
				continue
			}
			require.Equal(t, "gzip", w.Header().Get("Content-Encoding"), path)
			size := w.Body.Len()
			in, err := gzip.NewReader(w.Body)
			require.NoError(t, err)
			body, err := io.ReadAll(in)
			require.NoError(t, err)
			require.Greater(t, len(body), size, path)
		}
	}
	first := s.do(request(http.MethodGet, "/api/v1/task?id="+id.String(), nil))
	again := request(http.MethodGet, "/api/v1/task?id="+id.String(), nil)
	again.Header.Set("If-None-Match", first.Header().Get("ETag"))
	w := s.do(again)
	require.Equal(t, http.StatusNotModified, w.Code)
	require.Empty(t, w.Body.String())
	r := request(http.MethodGet, "/payload?id="+id.String(), nil)
	r.Header.Set("Accept-Encoding", "gzip")
	require.Empty(t, s.do(r).Header().Get("Content-Encoding"), "a download stays as it is")
}

// TestAssetNames: assets stay in caches, and have other names when they change.
func TestAssetNames(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, nil)
	w := s.do(request(http.MethodGet, assetPath(s, "style.css"), nil))
	require.Equal(t, "public, max-age=31536000, immutable", w.Header().Get("Cache-Control"))
	require.Equal(t, http.StatusNotFound, s.do(request(http.MethodGet, "/assets/style.css", nil)).Code)
}
