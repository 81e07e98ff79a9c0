// Package browsertest tests the dashboard of package codeqweb in a real browser, headless Chromium.
//
// The browser is the first of these programs in PATH: chromium-headless-shell, headless-shell,
// chromium, chromium-browser, google-chrome. On Debian:
//
//	apt-get install --no-install-recommends chromium-headless-shell fonts-dejavu-core
//
// Without one, all tests are skipped, unless the environment has CODEQ_BROWSER=required: then they
// fail. It runs without its sandbox, which root may not use, and resolves no name: the tests are
// served from 127.0.0.1.
//
// The screenshots in codeqweb/screenshots are made by
//
//	go test -run TestScreenshots -screenshots ../screenshots
package browsertest
