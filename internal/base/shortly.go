package base

import (
	"fmt"
	"strconv"
)

// Shortly returns a refused text for an error: quoted, or its length if it is long.
func Shortly(s string) string {
	if len(s) > 300 {
		return fmt.Sprintf("%d bytes", len(s))
	}
	return strconv.Quote(s)
}
