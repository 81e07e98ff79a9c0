package codeqweb_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/codeqweb"
)

// TestPages: every screen is shown, to those who may do all, and to those who may only look.
func TestPages(t *testing.T) {
	for _, access := range []codeqweb.Access{codeqweb.All, codeqweb.Read} {
		t.Run(access.String(), func(t *testing.T) {
			s, ids := loaded(t, as(access))
			for _, path := range pages(ids) {
				if access == codeqweb.Read && (path == "/audit" || path == "/bulks") {
					continue
				}
				page := s.get(path)
				require.Contains(t, page, "</html>", path)
				require.NotContains(t, page, "<no value>", path)
				require.NotContains(t, page, "ZgotmplZ", path)
				require.NotContains(t, page, "style=", path)
				if dir := os.Getenv("PAGES"); dir != "" {
					_ = os.WriteFile(filepath.Join(dir, strings.NewReplacer("/", "", "?", "_", "&", "_").Replace(path)+".html"), []byte(page), 0o600)
				}
				if access == codeqweb.Read {
					require.NotContains(t, page, `method="post"`, path)
					require.NotContains(t, page, "xyzzy", path)
				}
			}
		})
	}
}
