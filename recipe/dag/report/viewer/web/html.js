// Preact with htm's templates: what every component imports.

import { Fragment, h, render } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export { Fragment, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };
