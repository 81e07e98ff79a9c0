//go:build nextformat

package offline

import "codeq/internal/keys"

func init() { ranges[keys.NextFormat] = dropped }
